#include "common/console.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace tandem::tools {

namespace {

std::string coloured(std::string_view text, std::string_view code, std::FILE* stream) {
  return use_colour(stream) ? fmt::format("\x1b[{}m{}\x1b[0m", code, text) : std::string(text);
}

bool is_number(std::string_view cell) {
  return !cell.empty() && (cell[0] == '-' || (cell[0] >= '0' && cell[0] <= '9'));
}

}  // namespace

bool use_colour(std::FILE* stream) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  if (no_color != nullptr && no_color[0] != '\0') return false;
  if (terminal == nullptr || std::string_view(terminal) == "dumb") return false;
  return isatty(fileno(stream)) == 1;
}

std::string green(std::string_view text, std::FILE* stream) { return coloured(text, "32", stream); }

std::string red(std::string_view text, std::FILE* stream) { return coloured(text, "31", stream); }

Progress::Progress(int total) : total_(total), shown_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (dirty_) fmt::print(stderr, "\r\x1b[K");
}

void Progress::update(int done, std::string_view what) {
  if (!shown_) return;
  dirty_ = true;
  fmt::print(stderr, "\r\x1b[K[{}/{}] {}", done, total_, what);
  std::fflush(stderr);
}

std::string Table::text() const {
  std::vector<std::size_t> widths(rows_[0].size(), 0);
  for (const auto& row : rows_) {
    for (std::size_t column = 0; column < row.size(); ++column) {
      widths[column] = std::max(widths[column], row[column].size());
    }
  }
  std::string text;
  for (std::size_t index = 0; index < rows_.size(); ++index) {
    std::string line;
    for (std::size_t column = 0; column < rows_[index].size(); ++column) {
      // A heading stands as its column does.
      const bool right = is_number(rows_[index == 0 && rows_.size() > 1 ? 1 : index][column]);
      line += right ? fmt::format("{:>{}}  ", rows_[index][column], widths[column])
                    : fmt::format("{:<{}}  ", rows_[index][column], widths[column]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace tandem::tools
