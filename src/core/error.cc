// The text of an Error: code and message, then whichever facts apply.
#include "tandem/error.h"

#include <string>

#include "core/milliseconds.h"

namespace tandem {
namespace {

std::string compose(const ErrorInfo& info, const std::string& message) {
  std::string text = "tandem: " + std::string(name(info.code)) + ": " + message;
  auto add = [&text, separator = " ["](const std::string& fact) mutable {
    text += separator + fact;
    separator = ", ";
  };
  const std::size_t bare = text.size();
  if (info.operation != Operation::kNone) {
    add(std::string(name(info.operation)) + " of epoch " + std::to_string(info.epoch));
  }
  if (info.phase != Phase::kNone) add("phase " + std::string(name(info.phase)));
  if (info.peer >= 0) add("peer " + std::to_string(info.peer));
  if (info.expected != info.seen) {
    add("expected " + std::to_string(info.expected) + ", seen " + std::to_string(info.seen));
  }
  if (info.waited.count() > 0) {
    add("waited " + core::milliseconds(info.waited) + " of " + core::milliseconds(info.limit));
  }
  if (text.size() != bare) text += "]";
  return text;
}

}  // namespace

Error::Error(const ErrorInfo& info, const std::string& message, std::source_location where)
    : std::runtime_error(compose(info, message)), info_(info), message_(message), where_(where) {}

}  // namespace tandem
