#include "runtime/agreement.h"

#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "core/validation.h"

namespace tandem::runtime {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string text_of(const std::vector<std::byte>& message) {
  return {reinterpret_cast<const char*>(message.data()), message.size()};
}

// Lines of "name value"; neither holds a newline, names hold no space.
std::string serialise(const std::vector<std::pair<std::string, std::string>>& options) {
  std::string text;
  for (const auto& [name, value] : options) text += name + ' ' + value + '\n';
  return text;
}

std::vector<std::pair<std::string, std::string>> parse(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> options;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    const std::size_t space = line.find(' ');
    if (space != std::string_view::npos) {
      options.emplace_back(line.substr(0, space), line.substr(space + 1));
    }
    text.remove_prefix(std::min(text.size(), line.size() + 1));
  }
  return options;
}

}  // namespace

void share_error(Bootstrap& bootstrap, const std::optional<Error>& own) {
  // Empty: no error. Else a byte of code, then the text.
  std::string message;
  if (own) message = std::string(1, static_cast<char>(own->code())) + own->what();
  const std::vector<std::vector<std::byte>> all = bootstrap.all_gather(bytes_of(message));
  if (own) throw *own;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const std::string text = text_of(all[rank]);
    throw Error(ErrorInfo{.code = static_cast<ErrorCode>(text.front()),
                          .phase = Phase::kSetup,
                          .peer = static_cast<int>(rank)},
                "rank " + std::to_string(rank) + " failed: " + text.substr(1));
  }
}

void require_same_options(Bootstrap& bootstrap, const BufferOptions& options) {
  std::vector<std::vector<std::pair<std::string, std::string>>> all;
  for (const std::vector<std::byte>& message :
       bootstrap.all_gather(bytes_of(serialise(core::agreed_options(options))))) {
    all.push_back(parse(text_of(message)));
  }
  core::require_agreement(all);
}

}  // namespace tandem::runtime
