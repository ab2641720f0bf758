// The work that every contender of the CPU benchmark does: one step of an expert-parallel layer.
// Tokens, routing and weights follow from a seed, so that the MPI baseline and Tandem, run as
// different programs, carry the same rows; and every rank can say alone what it must have received.
//
// The experts are simulated: each reads all of a row it received and writes all of its output
// (apply_expert), outside the timed operations. Without that the rows would stay in the cache of
// the rank that wrote them, which no real program sees.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout/row.h"
#include "tandem/numeric.h"
#include "tandem/types.h"

namespace tandem::bench {

struct Case {
  int num_ranks = 2;
  int num_experts = 64;  // contiguous over the ranks; a multiple of num_ranks
  int num_tokens = 128;  // on every rank
  int hidden = 7168;
  int topk = 8;
  Format format = Format::kBFloat16;  // of the dispatch; x and the combine are bf16
  std::uint64_t seed = 1;

  [[nodiscard]] int num_local() const { return num_experts / num_ranks; }
  [[nodiscard]] layout::RowShape row() const { return {hidden, format}; }
  // Bytes that one rank's dispatch writes.
  [[nodiscard]] std::int64_t dispatch_bytes() const {
    return std::int64_t{num_tokens} * topk * row().pitch();
  }
};

inline std::uint64_t mix(std::uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

// The row of a token: both signs, magnitudes from 2^-7 to 2, every mantissa.
inline void fill_token(const Case& work, int rank, int token, bfloat16* row) {
  std::uint64_t state = mix(mix(work.seed ^ static_cast<std::uint64_t>(rank) << 40) + token);
  for (int h = 0; h < work.hidden; h += 4) {
    state = mix(state);
    for (int i = 0; i < 4 && h + i < work.hidden; ++i) {
      const auto bits = static_cast<std::uint32_t>(state >> (16 * i));
      row[h + i].bits =
          static_cast<std::uint16_t>((bits & 0x8000U) | ((bits & 0x3ffU) + (120U << 7)));
    }
  }
}

// Experts of a rank's tokens, [T, K]: distinct, every choice equally likely.
inline std::vector<std::int64_t> make_routing(const Case& work, int rank) {
  std::vector<std::int64_t> routing(static_cast<std::size_t>(work.num_tokens) * work.topk);
  std::vector<std::int64_t> experts(work.num_experts);
  std::iota(experts.begin(), experts.end(), 0);
  std::uint64_t state = mix(work.seed * 1000003 + rank);
  for (int token = 0; token < work.num_tokens; ++token) {
    for (int k = 0; k < work.topk; ++k) {
      state = mix(state);
      std::swap(experts[k], experts[k + state % (work.num_experts - k)]);
      routing[static_cast<std::size_t>(token) * work.topk + k] = experts[k];
    }
  }
  return routing;
}

// Weights of a rank's tokens, [T, K]: positive, each token's sum 1.
inline std::vector<float> make_weights(const Case& work, int rank) {
  std::vector<float> weights(static_cast<std::size_t>(work.num_tokens) * work.topk);
  std::uint64_t state = mix(work.seed * 7777777 + rank);
  for (int token = 0; token < work.num_tokens; ++token) {
    float* row = weights.data() + static_cast<std::size_t>(token) * work.topk;
    float sum = 0;
    for (int k = 0; k < work.topk; ++k) {
      state = mix(state);
      row[k] = 0.1F + static_cast<float>(state >> 40) * 0x1p-24F;
      sum += row[k];
    }
    for (int k = 0; k < work.topk; ++k) row[k] /= sum;
  }
  return weights;
}

// What one rank brings.
struct RankInput {
  RankInput(const Case& work, int rank)
      : x(static_cast<std::size_t>(work.num_tokens) * work.hidden),
        topk_idx(make_routing(work, rank)),
        topk_weights(make_weights(work, rank)) {
    for (int token = 0; token < work.num_tokens; ++token) {
      fill_token(work, rank, token, x.data() + static_cast<std::size_t>(token) * work.hidden);
    }
  }
  std::vector<bfloat16> x;
  std::vector<std::int64_t> topk_idx;
  std::vector<float> topk_weights;
};

// The most rows that any rank receives.
inline std::int64_t most_received_rows(const Case& work) {
  std::vector<std::int64_t> rows(work.num_ranks);
  for (int rank = 0; rank < work.num_ranks; ++rank) {
    for (const std::int64_t expert : make_routing(work, rank)) ++rows[expert / work.num_local()];
  }
  return *std::max_element(rows.begin(), rows.end());
}

// A stand-in for an expert: cheap, reads the whole row and writes the whole output. Rows of fp8
// take their values without the scales. The low mantissa bits tell the experts apart.
inline void apply_expert(const Case& work, int expert, const void* row, bfloat16* y) {
  const auto tag = static_cast<std::uint16_t>(expert & 0x7);
  if (work.format == Format::kBFloat16) {
    const auto* x = static_cast<const bfloat16*>(row);
    for (int h = 0; h < work.hidden; ++h) y[h].bits = static_cast<std::uint16_t>(x[h].bits ^ tag);
  } else {
    const auto* x = static_cast<const float8_e4m3*>(row);
    for (int h = 0; h < work.hidden; ++h) {
      const auto bits = static_cast<std::uint32_t>(x[h].bits);
      y[h].bits = static_cast<std::uint16_t>(
          (((bits & 0x80U) << 8) | (((bits & 0x7fU) << 4) + (112U << 7))) ^ tag);
    }
  }
}

// The bytes that a token's row has on the wire, by the definitions in numeric.h.
inline void encode_token(const Case& work, int rank, int token, std::vector<bfloat16>& x,
                         std::vector<std::byte>& wire) {
  x.resize(work.hidden);
  fill_token(work, rank, token, x.data());
  const layout::RowShape row = work.row();
  wire.assign(row.pitch(), std::byte{0});
  if (work.format == Format::kBFloat16) {
    std::memcpy(wire.data(), x.data(), row.value_bytes());
    return;
  }
  auto* values = reinterpret_cast<std::uint8_t*>(wire.data());
  for (int first = 0; first < work.hidden; first += kFp8GroupSize) {
    const int last = std::min(first + kFp8GroupSize, work.hidden);
    float amax = 0;
    for (int h = first; h < last; ++h) amax = std::max(amax, std::fabs(to_float(x[h])));
    const Fp8Scale scale = fp8_scale(amax, work.format);
    for (int h = first; h < last; ++h) {
      values[h] = to_float8_e4m3(to_float(x[h]) * scale.quantise).bits;
    }
    std::memcpy(wire.data() + row.scales_offset() + first / kFp8GroupSize * sizeof(float),
                &scale.dequantise, sizeof(float));
  }
}

// Checks what a rank received. `received(row)` gives {values, scales or null, source token};
// counts are per local expert, rows those of one expert after the other without gaps, by source
// rank and token. Throws std::runtime_error saying where it differs.
template <typename Received>
void check_received(const Case& work, int rank, const std::int32_t* counts, Received received) {
  std::vector<std::vector<std::int64_t>> routings;
  for (int source = 0; source < work.num_ranks; ++source) {
    routings.push_back(make_routing(work, source));
  }
  std::vector<bfloat16> x;
  std::vector<std::byte> wire;
  const layout::RowShape shape = work.row();
  std::int64_t row = 0;
  for (int local = 0; local < work.num_local(); ++local) {
    const std::int64_t first = row;
    for (int source = 0; source < work.num_ranks; ++source) {
      for (int i = 0; i < work.num_tokens * work.topk; ++i) {
        if (routings[source][i] != rank * work.num_local() + local) continue;
        const int token = i / work.topk;
        const auto [values, scales, source_token] = received(row);
        encode_token(work, source, token, x, wire);
        bool same =
            source_token == token && std::memcmp(values, wire.data(), shape.value_bytes()) == 0;
        if (is_fp8(work.format)) {
          same = same && std::memcmp(scales, wire.data() + shape.scales_offset(),
                                     sizeof(float) * shape.num_scales()) == 0;
        }
        if (!same) {
          throw std::runtime_error("rank " + std::to_string(rank) + ", row " + std::to_string(row) +
                                   ": not token " + std::to_string(token) + " of rank " +
                                   std::to_string(source));
        }
        ++row;
      }
    }
    if (counts[local] != row - first) {
      throw std::runtime_error(
          "rank " + std::to_string(rank) + ", local expert " + std::to_string(local) +
          ": count is " + std::to_string(counts[local]) + ", not " + std::to_string(row - first));
    }
  }
}

// Checks a rank's combined tokens, [T, H], to so many roundings of bf16 (the baseline's compiler
// may fuse products and sums). Throws std::runtime_error saying where it differs.
inline void check_combined(const Case& work, int rank, const bfloat16* out, int num_roundings = 1) {
  const RankInput input(work, rank);
  std::vector<bfloat16> x;
  std::vector<bfloat16> y(work.hidden);
  std::vector<std::byte> wire;
  std::vector<float> sum(work.hidden);
  std::vector<float> magnitude(work.hidden);
  for (int token = 0; token < work.num_tokens; ++token) {
    std::fill(sum.begin(), sum.end(), 0.0F);
    std::fill(magnitude.begin(), magnitude.end(), 0.0F);
    encode_token(work, rank, token, x, wire);
    for (int k = 0; k < work.topk; ++k) {
      const std::size_t i = static_cast<std::size_t>(token) * work.topk + k;
      apply_expert(work, static_cast<int>(input.topk_idx[i]), wire.data(), y.data());
      for (int h = 0; h < work.hidden; ++h) {
        const float product = input.topk_weights[i] * to_float(y[h]);
        sum[h] += product;
        magnitude[h] += std::fabs(product);
      }
    }
    for (int h = 0; h < work.hidden; ++h) {
      const float got = to_float(out[static_cast<std::size_t>(token) * work.hidden + h]);
      if (!(std::fabs(got - sum[h]) <=
            static_cast<float>(num_roundings) * 0x1p-8F * magnitude[h])) {
        throw std::runtime_error("rank " + std::to_string(rank) + ", token " +
                                 std::to_string(token) + ", channel " + std::to_string(h) + ": " +
                                 std::to_string(got) + " instead of " + std::to_string(sum[h]));
      }
    }
  }
}

}  // namespace tandem::bench
