// The spelling of every enumerator, one table per type.
#include <array>
#include <string_view>

#include "tandem/error.h"
#include "tandem/types.h"

namespace tandem {
namespace {

template <std::size_t N, typename Enum>
std::string_view pick(const std::array<std::string_view, N>& names, Enum value) {
  const auto index = static_cast<std::size_t>(value);
  return index < N ? names[index] : std::string_view("unknown");
}

}  // namespace

std::string_view name(DType dtype) {
  return pick(std::array<std::string_view, 6>{"bf16", "fp16", "fp32", "fp8", "int32", "int64"},
              dtype);
}

std::string_view name(Format format) {
  return pick(
      std::array<std::string_view, 6>{"bf16", "fp16", "fp32", "fp8", "fp8-pow2", "fp8-ue8m0"},
      format);
}

std::string_view name(Placement placement) {
  return pick(std::array<std::string_view, 3>{"automatic", "packed", "slotted"}, placement);
}

std::string_view name(Layout layout) {
  return pick(std::array<std::string_view, 2>{"padded", "packed"}, layout);
}

std::string_view name(Backend backend) {
  return pick(std::array<std::string_view, 2>{"cpu", "cuda"}, backend);
}

std::string_view name(OnTimeout on_timeout) {
  return pick(std::array<std::string_view, 2>{"fail", "mask"}, on_timeout);
}

std::string_view name(Operation operation) {
  return pick(std::array<std::string_view, 3>{"none", "dispatch", "combine"}, operation);
}

std::string_view name(Phase phase) {
  return pick(std::array<std::string_view, 8>{"none", "set-up", "enter", "header", "rows", "ready",
                                              "combine half", "membership"},
              phase);
}

std::string_view name(ErrorCode code) {
  return pick(
      std::array<std::string_view, 12>{"invalid argument", "capacity", "order", "stale handle",
                                       "timeout", "mismatch", "unreachable", "unsupported",
                                       "resource", "peer lost", "failed buffer", "masked"},
      code);
}

}  // namespace tandem
