// What one rank tells about one combination: travels as JSON from a rank's process.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "test_low_latency/timing.h"

namespace tandem::tools {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Samples, dispatch, dispatch_send, dispatch_receive, combine,
                                   combine_send, combine_receive)

// Facts seen in what the operations were given and gave back, not taken from the options: they
// prove that an option reached its operation.
struct Observed {
  std::int64_t process = 0;      // where this rank ran
  std::string backend;           // of the buffer
  double timeout_s = 0;          // of the buffer
  std::int64_t experts = 0;      // local ones
  std::int64_t sent_tokens = 0;  // T
  std::int64_t received_rows = 0;
  std::string value_dtype;            // of the received rows
  int received_dims = 0;              // 3: padded layout, 2: packed
  bool into_callers_tensor = false;   // rows arrived in recv_x: slotted placement
  bool hook_returned = false;         // by dispatch and by combine
  bool combine_buffer_taken = false;  // y lay where next_combine_buffer said: zero-copy
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Observed, process, backend, timeout_s, experts, sent_tokens,
                                   received_rows, value_dtype, received_dims, into_callers_tensor,
                                   hook_returned, combine_buffer_taken)

struct RankReport {
  int combination = 0;  // index in TestOptions::combinations
  std::int64_t checks = 0;
  std::vector<std::string> failures = {};
  bool bitwise_equal = true;  // rows, metadata and combined tokens
  double max_abs_error = 0;
  std::uint64_t hash = 0;  // of the first scenario
  int seeds = 0;           // scenarios run to their end
  Samples samples = {};
  Observed observed = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankReport, combination, checks, failures, bitwise_equal,
                                   max_abs_error, hash, seeds, samples, observed)

}  // namespace tandem::tools
