// What people see: aligned tables, colours and a progress line, the last two on terminals only.
#pragma once

#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::tools {

// A terminal that understands colours, unless NO_COLOR (https://no-color.org) is set.
bool use_colour(std::FILE* stream);

std::string green(std::string_view text, std::FILE* stream);
std::string red(std::string_view text, std::FILE* stream);

// One line on standard error that is overwritten as work goes on; nothing where it is no terminal.
class Progress {
 public:
  explicit Progress(int total);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(int done, std::string_view what);

 private:
  int total_;
  bool shown_;
  bool dirty_ = false;
};

// Columns as wide as their widest cell; cells that begin with a digit or '-' are numbers, to the
// right.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  [[nodiscard]] std::string text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace tandem::tools
