#include "runtime/agreement.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <vector>

#include "core/validation.h"
#include "runtime/failure.h"

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

std::optional<Failure> lowest_failure(Bootstrap& bootstrap, const std::optional<Failure>& own) {
  const std::vector<std::byte> message = own ? encode(*own) : std::vector<std::byte>{};
  const std::vector<std::vector<std::byte>> outcomes = bootstrap.all_gather(message);
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    if (outcomes[rank].empty()) continue;
    if (auto failure = decode_failure(outcomes[rank])) return failure;
    return setup_failure(
        ErrorCode::kMismatch, rank,
        "rank " + std::to_string(rank) + " answered a set-up step with an unknown message");
  }
  return std::nullopt;
}

}  // namespace

void agree(Bootstrap& bootstrap, const std::optional<Failure>& own) {
  if (const std::optional<Failure> failure = lowest_failure(bootstrap, own)) failure->raise();
}

void agree(Bootstrap& bootstrap, const std::optional<Error>& own) {
  std::optional<Failure> failure;
  if (own) {
    failure = setup_failure(own->code(), bootstrap.rank(),
                            "rank " + std::to_string(bootstrap.rank()) + " failed: " + own->what());
  }
  failure = lowest_failure(bootstrap, failure);
  if (own) throw *own;
  if (failure) failure->raise();
}

std::string describe_options(const BufferOptions& options) {
  return serialise(core::agreed_options(options));
}

void require_same_options(int peer, const std::string& theirs, int rank,
                          const BufferOptions& options) {
  core::require_agreement({{peer, parse(theirs)}, {rank, core::agreed_options(options)}});
}

void require_same_options(Bootstrap& bootstrap, const BufferOptions& options) {
  std::vector<core::RankOptions> all;
  for (const std::vector<std::byte>& message :
       bootstrap.all_gather(bytes_of(describe_options(options)))) {
    all.push_back({static_cast<int>(all.size()), parse(text_of(message))});
  }
  core::require_agreement(all);
}

}  // namespace tandem::runtime
