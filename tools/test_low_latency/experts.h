// Simulated experts: each multiplies its rows by a factor of its own, so that a row that went to
// another expert, or came back from another row, shows in the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tandem/types.h"

namespace tandem::tools {

// y = x * factor, rounded to y's dtype.
inline float expert_factor(int expert) { return static_cast<float>(1 + expert % 7); }

// Received rows back to float32: `values` [rows, H] of the format's dtype, `scales` [rows, S] as
// dispatch gives them (nothing unless fp8).
void dequantise(Format format, int hidden, std::span<const std::byte> values,
                std::span<const std::byte> scales, std::span<float> x);

// y [rows, H] of `dtype` from x [rows, H].
void apply_expert(int expert, std::span<const float> x, DType dtype, std::span<std::byte> y);

// Elements of one row's scales: ceil(H / 128) floats, or ceil(H / 512) int32; 0 unless fp8.
int num_scales(Format format, int hidden);

}  // namespace tandem::tools
