// Loops over ranks, experts, tokens and top-k, in the order that the documents describe, and one
// array access at a time. Nothing here is fast; everything is meant to be seen at a glance.
#include "reference/reference.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "layout/row.h"
#include "tandem/numeric.h"

namespace tandem::reference {
namespace {

// --- Elements of typed arrays of bytes ----------------------------------------------------------

template <typename T>
T element(const std::vector<std::byte>& bytes, std::int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

template <typename T>
void set_element(std::vector<std::byte>& bytes, std::int64_t index, T value) {
  std::memcpy(bytes.data() + index * static_cast<std::int64_t>(sizeof(T)), &value, sizeof(T));
}

float read(const std::vector<std::byte>& bytes, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(element<bfloat16>(bytes, index));
    case DType::kFloat16:
      return to_float(element<float16>(bytes, index));
    case DType::kFloat32:
      return element<float>(bytes, index);
    case DType::kFloat8E4M3:
      return to_float(element<float8_e4m3>(bytes, index));
    default:
      throw std::invalid_argument("reference: not a floating-point dtype");
  }
}

void write(std::vector<std::byte>& bytes, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      return set_element(bytes, index, to_bfloat16(value));
    case DType::kFloat16:
      return set_element(bytes, index, to_float16(value));
    case DType::kFloat32:
      return set_element(bytes, index, value);
    default:
      throw std::invalid_argument("reference: not a dtype of a combine");
  }
}

float round(float value, DType dtype) {
  std::vector<std::byte> bytes(size_of(dtype));
  write(bytes, dtype, 0, value);
  return read(bytes, dtype, 0);
}

// Copies `count` elements of `size` bytes.
void copy_elements(std::vector<std::byte>& to, std::int64_t to_index,
                   const std::vector<std::byte>& from, std::int64_t from_index, std::int64_t count,
                   std::int64_t size) {
  std::copy_n(from.begin() + from_index * size, count * size, to.begin() + to_index * size);
}

// --- Who owns what, and which row is whose ------------------------------------------------------

std::vector<int> owners(const Problem& problem) {
  if (!problem.expert_owners.empty()) return problem.expert_owners;
  std::vector<int> result;
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    const bool one_more = rank < problem.num_experts % problem.num_ranks;
    const int num_local = problem.num_experts / problem.num_ranks + (one_more ? 1 : 0);
    for (int i = 0; i < num_local; ++i) result.push_back(rank);
  }
  return result;
}

std::vector<int> experts_of(const Problem& problem, int rank) {
  const std::vector<int> owner = owners(problem);
  std::vector<int> result;
  for (int expert = 0; expert < problem.num_experts; ++expert) {
    if (owner[expert] == rank) result.push_back(expert);
  }
  return result;
}

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(std::string("reference: ") + what);
}

void check(const Problem& problem) {
  const auto num_ranks = static_cast<std::size_t>(problem.num_ranks);
  require(problem.ranks.size() == num_ranks, "one RankInput for each rank");
  require(owners(problem).size() == static_cast<std::size_t>(problem.num_experts),
          "one owner for each expert");
  require(problem.row_alignment >= 1, "row_alignment of at least 1");
  require(is_fp8(problem.format) || value_dtype(problem.format) == problem.x_dtype,
          "x of the format's dtype");
  for (const RankInput& input : problem.ranks) {
    const std::size_t tokens = input.num_tokens;
    require(input.num_tokens <= problem.max_tokens, "no more tokens than max_tokens");
    require(input.topk_idx.size() == tokens * problem.topk, "topk_idx of [T, K]");
    require(input.x.size() == tokens * problem.hidden * size_of(problem.x_dtype), "x of [T, H]");
    for (const std::int64_t expert : input.topk_idx) {
      require(expert < problem.num_experts, "expert ids below E");
    }
  }
}

// One selection, and the row on the expert's owner that it takes.
struct Arrival {
  std::int64_t row = 0;
  int source = 0;
  int token = 0;
  int k = 0;
};

// The output of `rank` without values and scales, and the selections that arrive there.
struct Received {
  RankOutput output;
  std::vector<Arrival> arrivals;  // ascending rows
};

Received receive(const Problem& problem, int rank) {
  Received result;
  RankOutput& output = result.output;
  output.experts = experts_of(problem, rank);

  std::int64_t first = 0;  // first row of the expert at hand
  for (const int expert : output.experts) {
    output.offsets.push_back(first);
    std::int64_t row = first;
    for (int source = 0; source < problem.num_ranks; ++source) {
      const RankInput& input = problem.ranks[source];
      const std::int64_t source_first = row;
      for (int token = 0; token < input.num_tokens; ++token) {
        for (int k = 0; k < problem.topk; ++k) {
          if (input.topk_idx[std::int64_t{token} * problem.topk + k] != expert) continue;
          result.arrivals.push_back({row, source, token, k});
          ++row;
        }
      }
      const std::int64_t count = row - source_first;
      output.ranges.push_back(((source_first - first) << 32) | count);
    }
    output.counts.push_back(static_cast<std::int32_t>(row - first));
    if (problem.layout == Layout::kPadded) {
      first += std::int64_t{problem.num_ranks} * problem.max_tokens;
    } else {
      first = row;
      while (first % problem.row_alignment != 0) ++first;
    }
  }
  output.offsets.push_back(first);
  output.num_rows = first;
  return result;
}

// The first reason for kCapacity on this rank, if there is one.
bool is_too_much(const Problem& problem, int rank, Placement placement,
                 std::int64_t capacity_rows) {
  const Received received = receive(problem, rank);
  if (received.output.num_rows > capacity_rows) return true;
  if (problem.layout == Layout::kPadded) {
    for (const std::int32_t count : received.output.counts) {
      if (count > std::int64_t{problem.num_ranks} * problem.max_tokens) return true;
    }
  }
  if (placement == Placement::kSlotted) {
    const int num_local = static_cast<int>(received.output.experts.size());
    const std::int64_t limit = std::int64_t{problem.max_tokens} * std::min(problem.topk, num_local);
    std::vector<std::int64_t> from(problem.num_ranks);
    for (const Arrival& arrival : received.arrivals) ++from[arrival.source];
    for (const std::int64_t rows : from) {
      if (rows > limit) return true;
    }
  }
  return false;
}

// --- Values -------------------------------------------------------------------------------------

// Elements and bytes of one row's scales.
std::int64_t num_scales(const Problem& problem) {
  return layout::RowShape{problem.hidden, problem.format}.num_scales();
}
constexpr std::int64_t kScaleBytes = 4;  // float32, or four UE8M0 bytes

// All tokens of one rank in the wire format.
struct Encoded {
  std::vector<std::byte> values;  // [T, H]
  std::vector<std::byte> scales;  // [T, num_scales], fp8 only
};

Encoded encode(const Problem& problem, const RankInput& input) {
  if (!is_fp8(problem.format)) return {input.x, {}};

  const std::int64_t hidden = problem.hidden;
  Encoded encoded;
  encoded.values.resize(input.num_tokens * hidden);
  encoded.scales.resize(input.num_tokens * num_scales(problem) * kScaleBytes);
  for (std::int64_t token = 0; token < input.num_tokens; ++token) {
    for (std::int64_t group = 0; group * kFp8GroupSize < hidden; ++group) {
      const std::int64_t begin = token * hidden + group * kFp8GroupSize;
      const std::int64_t end =
          token * hidden + std::min<std::int64_t>((group + 1) * kFp8GroupSize, hidden);

      std::uint32_t amax_bits = 0;  // magnitudes order like their bits; NaN is above infinity
      for (std::int64_t i = begin; i < end; ++i) {
        const auto bits = std::bit_cast<std::uint32_t>(read(input.x, problem.x_dtype, i));
        amax_bits = std::max(amax_bits, bits & 0x7fffffffU);
      }
      const Fp8Scale scale = fp8_scale(std::bit_cast<float>(amax_bits), problem.format);

      for (std::int64_t i = begin; i < end; ++i) {
        const float scaled = read(input.x, problem.x_dtype, i) * scale.quantise;
        set_element(encoded.values, i, to_float8_e4m3(scaled));
      }
      if (problem.format == Format::kFp8Ue8m0) {  // byte g of the row: little end first
        set_element(encoded.scales, token * num_scales(problem) * kScaleBytes + group,
                    to_ue8m0(scale.dequantise));
      } else {
        set_element(encoded.scales, token * num_scales(problem) + group, scale.dequantise);
      }
    }
  }
  return encoded;
}

}  // namespace

std::vector<RankOutput> dispatch(const Problem& problem) {
  check(problem);
  std::vector<Encoded> encoded;
  for (const RankInput& input : problem.ranks) encoded.push_back(encode(problem, input));

  const std::int64_t hidden = problem.hidden;
  const std::int64_t value_size = size_of(value_dtype(problem.format));
  std::vector<RankOutput> outputs;
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    require(!is_too_much(problem, rank, Placement::kPacked, INT64_MAX),
            "no more rows for an expert than its padding has (see exceeds_capacity)");
    auto [output, arrivals] = receive(problem, rank);
    output.source_ranks.assign(output.num_rows, -1);
    output.source_tokens.assign(output.num_rows, -1);
    output.values.resize(output.num_rows * hidden * value_size);
    output.scales.resize(output.num_rows * num_scales(problem) * kScaleBytes);
    for (const Arrival& arrival : arrivals) {
      const Encoded& from = encoded[arrival.source];
      output.source_ranks[arrival.row] = arrival.source;
      output.source_tokens[arrival.row] = arrival.token;
      copy_elements(output.values, arrival.row * hidden, from.values, arrival.token * hidden,
                    hidden, value_size);
      copy_elements(output.scales, arrival.row * num_scales(problem), from.scales,
                    arrival.token * num_scales(problem), num_scales(problem), kScaleBytes);
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

std::vector<float> dequantise(const RankOutput& output, int hidden, Format format) {
  const std::int64_t scales_per_row = layout::RowShape{hidden, format}.num_scales();
  std::vector<float> result(output.num_rows * hidden);
  for (std::int64_t row = 0; row < output.num_rows; ++row) {
    for (std::int64_t h = 0; h < hidden; ++h) {
      const float value = read(output.values, value_dtype(format), row * hidden + h);
      const std::int64_t group = h / kFp8GroupSize;
      float scale = 1.0F;
      if (format == Format::kFp8Ue8m0) {
        scale = from_ue8m0(
            element<std::uint8_t>(output.scales, row * scales_per_row * kScaleBytes + group));
      } else if (is_fp8(format)) {
        scale = element<float>(output.scales, row * scales_per_row + group);
      }
      result[row * hidden + h] = value * scale;
    }
  }
  return result;
}

std::vector<std::vector<std::byte>> combine(const Problem& problem,
                                            const std::vector<std::vector<std::byte>>& y,
                                            DType dtype) {
  check(problem);
  const std::int64_t hidden = problem.hidden;
  const std::int64_t topk = problem.topk;
  require(y.size() == problem.ranks.size(), "y of each rank");

  // Where each selection's result lies.
  struct Place {
    int rank = -1;
    std::int64_t row = -1;
  };
  std::vector<std::vector<Place>> places;  // [R][T * K]
  for (const RankInput& input : problem.ranks) {
    require(input.topk_weights.size() == input.topk_idx.size(), "topk_weights of [T, K]");
    places.emplace_back(input.topk_idx.size());
  }
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    const Received received = receive(problem, rank);
    require(y[rank].size() ==
                static_cast<std::size_t>(received.output.num_rows * hidden * size_of(dtype)),
            "y of [num_rows, H]");
    for (const Arrival& arrival : received.arrivals) {
      places[arrival.source][arrival.token * topk + arrival.k] = {rank, arrival.row};
    }
  }

  std::vector<std::vector<std::byte>> outs;
  for (int source = 0; source < problem.num_ranks; ++source) {
    const RankInput& input = problem.ranks[source];
    std::vector<std::byte> out(input.num_tokens * hidden * size_of(dtype));
    for (std::int64_t token = 0; token < input.num_tokens; ++token) {
      for (std::int64_t h = 0; h < hidden; ++h) {
        // Of the experts of one rank, or, for -1, of all.
        const auto sum_of = [&](int rank) {
          float sum = 0.0F;
          for (std::int64_t k = 0; k < topk; ++k) {
            const Place& place = places[source][token * topk + k];
            if (place.rank < 0 || (rank >= 0 && place.rank != rank)) continue;
            const float value = read(y[place.rank], dtype, place.row * hidden + h);
            const float product = input.topk_weights[token * topk + k] * value;
            sum = sum + product;  // compiled without contraction: two roundings
          }
          return sum;
        };
        float sum = 0.0F;
        if (problem.partial_sums) {
          std::vector<int> seen;
          for (std::int64_t k = 0; k < topk; ++k) {
            const int rank = places[source][token * topk + k].rank;
            if (rank < 0 || std::find(seen.begin(), seen.end(), rank) != seen.end()) continue;
            seen.push_back(rank);
            sum = sum + round(sum_of(rank), dtype);
          }
        } else {
          sum = sum_of(-1);
        }
        write(out, dtype, token * hidden + h, sum);
      }
    }
    outs.push_back(std::move(out));
  }
  return outs;
}

bool exceeds_capacity(const Problem& problem, Placement placement, std::int64_t capacity_rows) {
  check(problem);
  for (int rank = 0; rank < problem.num_ranks; ++rank) {
    if (is_too_much(problem, rank, placement, capacity_rows)) return true;
  }
  return false;
}

}  // namespace tandem::reference
