#include "bench/cases.h"

#include <fmt/format.h>

namespace tandem::tools {

namespace {

// Bytes of a token's row that carry something: values and, for fp8, scales.
std::int64_t row_bytes(int hidden, Format format) {
  const std::int64_t values = std::int64_t{hidden} * size_of(value_dtype(format));
  if (!is_fp8(format)) return values;
  const std::int64_t groups = (hidden + kFp8GroupSize - 1) / kFp8GroupSize;
  return values + (format == Format::kFp8Ue8m0 ? (groups + 3) / 4 * 4 : groups * 4);
}

}  // namespace

std::string_view name(BenchRouting routing) {
  switch (routing) {
    case BenchRouting::kHot:
      return "hot";
    case BenchRouting::kReal:
      return "real";
    default:
      return "uniform";
  }
}

std::string describe(const BenchCase& work) {
  return fmt::format("{} ranks x {} SMs T {} H {} K {} E {} {} {} {} {}", work.ranks,
                     work.sms_per_rank, work.tokens, work.hidden, work.topk, work.experts,
                     name(work.format), name(work.placement),
                     work.zero_copy ? "zero-copy" : "staged", name(work.routing));
}

BenchBytes bytes_moved(const BenchCase& work, std::int64_t rows) {
  const std::int64_t tokens = std::int64_t{work.ranks} * work.tokens;
  const std::int64_t token_bytes = std::int64_t{work.hidden} * 2;  // bf16 in, bf16 out
  const std::int64_t sent = rows * row_bytes(work.hidden, work.format);
  const std::int64_t returned = rows * token_bytes;
  return {.dispatch = tokens * token_bytes + sent * (work.placement == Placement::kSlotted ? 3 : 1),
          .combine = returned * (work.zero_copy ? 1 : 3) + tokens * token_bytes};
}

double floor_us(std::int64_t bytes, double copy_gbs) {
  return static_cast<double>(bytes) / (copy_gbs * 1e3);
}

}  // namespace tandem::tools
