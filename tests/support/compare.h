// Comparing what an operation produced with what the oracle says, and saying where they part: rank,
// expert, row, source, token, channel and both values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "support/scenario.h"
#include "tandem/tandem.h"

namespace tandem::test {

// The elements of a view in memory of the backend under test, row-major and without gaps.
[[nodiscard]] std::vector<std::byte> download(ConstTensorView view, void* stream);
void upload(TensorView view, const std::byte* bytes, void* stream);

template <typename T>
std::vector<T> download_as(ConstTensorView view, void* stream) {
  const std::vector<std::byte> bytes = download(view, stream);
  const T* first = reinterpret_cast<const T*>(bytes.data());
  return std::vector<T>(first, first + bytes.size() / sizeof(T));
}

// Bitwise equality of `count` elements, except that where `any_nan` is set any NaN equals any NaN.
// The index of the first difference, or -1.
[[nodiscard]] std::int64_t first_difference(const std::byte* actual, const std::byte* expected,
                                            std::int64_t count, DType dtype, bool any_nan);

// An element as text: its value and its bits.
[[nodiscard]] std::string describe(const std::byte* bytes, std::int64_t index, DType dtype);

// Everything but the hook of a dispatch's result; "" if it is as the oracle says.
[[nodiscard]] std::string compare_received(const Scenario& scenario, int rank,
                                           const DispatchResult& result, void* stream);

// A combine's result; "" if it is as the oracle says.
[[nodiscard]] std::string compare_combined(const Scenario& scenario, int rank, ConstTensorView out,
                                           void* stream);

}  // namespace tandem::test
