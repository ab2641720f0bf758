// What `tandem bench` measures: one case is one row of its table. And what a case must move: the
// bytes, and so the time below which no implementation can stay.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/types.h"

namespace tandem::tools {

enum class BenchRouting {
  kUniform,  // every token selects K distinct experts, all equally likely
  kHot,      // the same, but every token's first choice is expert 0
  kReal,     // of a trained layer, from a file
};

std::string_view name(BenchRouting routing);

struct BenchCase {
  int ranks = 2;
  int sms_per_rank = 0;  // GPU ranks; 0: has none
  int tokens = 128;      // of each rank
  int hidden = 7168;
  int topk = 8;
  int experts = 64;
  Format format = Format::kBFloat16;  // of the dispatch; combines are bf16
  Placement placement = Placement::kPacked;
  bool zero_copy = true;
  BenchRouting routing = BenchRouting::kUniform;
  Layout layout = Layout::kPadded;
};

// "2 ranks x 64 SMs T 128 H 7168 K 8 E 64 bf16 packed zero-copy uniform"
std::string describe(const BenchCase& work);

// Bytes that all ranks together read and write, for `rows` rows received over all ranks.
struct BenchBytes {
  std::int64_t dispatch = 0;
  std::int64_t combine = 0;
  [[nodiscard]] std::int64_t pair() const { return dispatch + combine; }
};

// A dispatch reads every token once and writes every row (values and scales); slotted placement
// reads and writes the rows once more. A combine reads every row and writes every token; staging
// reads and writes the rows once more. Control words, indices and weights are not counted.
BenchBytes bytes_moved(const BenchCase& work, std::int64_t rows);

// Microseconds that so many bytes, read and written, take at a copy's rate.
double floor_us(std::int64_t bytes, double copy_gbs);

}  // namespace tandem::tools
