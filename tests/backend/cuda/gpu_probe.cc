// A quick look at the CUDA backend on a real GPU: results against the oracle in the main cases,
// then times of captured graphs. Needs nothing but this library; the conformance suite and
// `tandem bench` say more.
//   gpu_probe check          gpu_probe time RANKS TOKENS FORMAT(bf16|fp8) [slotted] [staged]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "reference/reference.h"
#include "runtime/backend.h"
#include "runtime/buffer_state.h"
#include "tandem/tandem.h"

namespace {

using namespace tandem;

void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

struct Case {
  int ranks = 2;
  int experts = 64;
  int hidden = 7168;
  int topk = 8;
  int max_tokens = 128;
  std::vector<int> tokens;  // by rank, cyclic
  Format format = Format::kBFloat16;
  DType x_dtype = DType::kBFloat16;
  Placement placement = Placement::kPacked;
  Layout layout = Layout::kPadded;
  int alignment = 1;
  bool zero_copy = true;
  bool hook = false;
  bool wide = true;
  DType y_dtype = DType::kBFloat16;
  std::string text() const {
    return std::to_string(ranks) + " ranks E" + std::to_string(experts) + " H" +
           std::to_string(hidden) + " K" + std::to_string(topk) + " M" +
           std::to_string(max_tokens) + " " + std::string(name(format)) + " of " +
           std::string(name(x_dtype)) + " " + std::string(name(placement)) + " layout " +
           std::string(name(layout)) + (zero_copy ? " zero-copy" : " staged") +
           (hook ? " hook" : "");
  }
};

std::vector<std::byte> random_values(std::mt19937& random, std::size_t count, DType dtype) {
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(count * size_of(dtype));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = normal(random);
    if (dtype == DType::kFloat32) std::memcpy(&bytes[i * 4], &value, 4);
    if (dtype == DType::kBFloat16) {
      const auto bits = to_bfloat16(value);
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
    if (dtype == DType::kFloat16) {
      const auto bits = to_float16(value);
      std::memcpy(&bytes[i * 2], &bits, 2);
    }
  }
  return bytes;
}

template <typename T>
std::vector<T> to_host(ConstTensorView view, cudaStream_t stream) {
  std::vector<T> values(static_cast<std::size_t>(view.num_elements()));
  TensorView host;
  host = TensorView(values.data(), view.dtype, {1});
  host.num_dims = view.num_dims;
  host.shape = view.shape;
  std::int64_t stride = 1;
  for (int dim = view.num_dims - 1; dim >= 0; --dim) {
    host.strides[dim] = stride;
    stride *= view.shape[dim];
  }
  copy(host, view, Backend::kCuda, stream);
  return values;
}

int run_case(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  reference::Problem problem{.num_ranks = c.ranks,
                             .num_experts = c.experts,
                             .hidden = c.hidden,
                             .topk = c.topk,
                             .max_tokens = c.max_tokens,
                             .expert_owners = {},
                             .x_dtype = c.x_dtype,
                             .format = c.format,
                             .layout = c.layout,
                             .row_alignment = c.alignment,
                             .ranks = {}};
  for (int rank = 0; rank < c.ranks; ++rank) {
    reference::RankInput input;
    input.num_tokens = c.tokens.empty() ? c.max_tokens : c.tokens[rank % c.tokens.size()];
    input.x = random_values(random, std::size_t(input.num_tokens) * c.hidden, c.x_dtype);
    for (int token = 0; token < input.num_tokens; ++token) {
      std::vector<int> experts(c.experts);
      for (int e = 0; e < c.experts; ++e) experts[e] = e;
      for (int k = 0; k < c.topk; ++k) {
        std::swap(experts[k % c.experts],
                  experts[k % c.experts + random() % (c.experts - k % c.experts)]);
        input.topk_idx.push_back(random() % 16 == 0 || k >= c.experts ? -1 : experts[k]);
        input.topk_weights.push_back(std::uniform_real_distribution<float>()(random));
      }
    }
    problem.ranks.push_back(std::move(input));
  }
  const auto expected = reference::dispatch(problem);
  std::vector<std::vector<std::byte>> y;
  for (int rank = 0; rank < c.ranks; ++rank) {
    // rows of capacity: at least those of the result
    y.push_back(random_values(random, std::size_t(expected[rank].num_rows) * c.hidden, c.y_dtype));
  }
  const auto combined = reference::combine(problem, y, c.y_dtype);

  std::barrier meet(c.ranks);
  std::mutex mutex;
  std::string failures;
  const auto fail = [&](int rank, const std::string& what) {
    const std::lock_guard lock(mutex);
    if (failures.size() < 600) failures += " [rank " + std::to_string(rank) + ": " + what + "]";
  };
  run_threads(c.ranks, [&](const Communicator& communicator) {
    const int rank = communicator.rank();
    try {
      cudaStream_t stream = nullptr;
      check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      const bool wide_format = c.format == Format::kFloat32 || c.y_dtype == DType::kFloat32;
      Buffer buffer(communicator,
                    {.backend = Backend::kCuda,
                     .num_experts = c.experts,
                     .max_tokens = c.max_tokens,
                     .max_hidden = c.hidden,
                     .max_topk = c.topk,
                     .widest_format = wide_format ? Format::kFloat32 : Format::kBFloat16,
                     .timeout = std::chrono::seconds(2)});
      const auto& input = problem.ranks[rank];
      const std::int64_t t = input.num_tokens;
      Array x(Backend::kCuda, c.x_dtype, {t, c.hidden});
      Array indices(Backend::kCuda, c.wide ? DType::kInt64 : DType::kInt32, {t, c.topk});
      Array weights(Backend::kCuda, DType::kFloat32, {t, c.topk});
      Array out(Backend::kCuda, c.y_dtype, {t, c.hidden});
      copy(x, ConstTensorView(input.x.data(), c.x_dtype, {t, c.hidden}), Backend::kCuda, stream);
      std::vector<std::int32_t> narrow(input.topk_idx.begin(), input.topk_idx.end());
      copy(indices,
           c.wide ? ConstTensorView(input.topk_idx.data(), DType::kInt64, {t, c.topk})
                  : ConstTensorView(narrow.data(), DType::kInt32, {t, c.topk}),
           Backend::kCuda, stream);
      copy(weights, ConstTensorView(input.topk_weights.data(), DType::kFloat32, {t, c.topk}),
           Backend::kCuda, stream);
      const std::int64_t local = buffer.num_local_experts();
      const std::int64_t rows_each = std::int64_t(c.ranks) * c.max_tokens;
      const std::int64_t rows =
          c.layout == Layout::kPadded ? local * rows_each : buffer.capacity_rows();
      const layout::RowShape row{c.hidden, c.format};
      Array recv_x;
      Array recv_scales;
      Array staged;
      TensorView rx;
      TensorView rs;
      if (c.placement == Placement::kSlotted) {
        recv_x = Array(Backend::kCuda, value_dtype(c.format), {rows, c.hidden});
        rx = c.layout == Layout::kPadded ? TensorView(recv_x.view().data, value_dtype(c.format),
                                                      {local, rows_each, c.hidden})
                                         : recv_x.view();
        if (is_fp8(c.format)) {
          const DType scales = c.format == Format::kFp8Ue8m0 ? DType::kInt32 : DType::kFloat32;
          recv_scales = Array(Backend::kCuda, scales, {rows, row.num_scales()});
          rs = c.layout == Layout::kPadded ? TensorView(recv_scales.view().data, scales,
                                                        {local, rows_each, row.num_scales()})
                                           : recv_scales.view();
        }
      }
      if (!c.zero_copy) staged = Array(Backend::kCuda, c.y_dtype, {rows, c.hidden});
      for (int round = 0; round < 3; ++round) {
        meet.arrive_and_wait();
        DispatchResult result = buffer.dispatch(x, indices,
                                                {.format = c.format,
                                                 .placement = c.placement,
                                                 .layout = c.layout,
                                                 .row_alignment = c.alignment,
                                                 .return_hook = c.hook,
                                                 .recv_x = rx,
                                                 .recv_scales = rs,
                                                 .stream = stream});
        if (c.hook) result.hook();
        check_cuda(cudaStreamSynchronize(stream));
        buffer.check();
        const auto& want = expected[rank];
        if (to_host<std::int32_t>(result.counts, stream) != want.counts) fail(rank, "counts");
        if (to_host<std::int64_t>(result.offsets, stream) != want.offsets) fail(rank, "offsets");
        if (to_host<std::int64_t>(result.ranges, stream) != want.ranges) fail(rank, "ranges");
        const auto sources = to_host<std::int32_t>(result.source_tokens, stream);
        // Rows one by one.
        const int size = size_of(value_dtype(c.format));
        std::vector<std::byte> all(std::size_t(result.x.num_elements()) * size);
        {
          TensorView host(all.data(), result.x.dtype, {1});
          host.num_dims = result.x.num_dims;
          host.shape = result.x.shape;
          std::int64_t stride = 1;
          for (int dim = host.num_dims - 1; dim >= 0; --dim) {
            host.strides[dim] = stride;
            stride *= host.shape[dim];
          }
          copy(host, result.x, Backend::kCuda, stream);
        }
        std::vector<std::byte> all_scales;
        const std::size_t scale_bytes = std::size_t(row.num_scales()) * 4;
        if (is_fp8(c.format)) {
          all_scales.resize(std::size_t(result.scales.num_elements()) * 4);
          TensorView host(all_scales.data(), result.scales.dtype, {1});
          host.num_dims = result.scales.num_dims;
          host.shape = result.scales.shape;
          std::int64_t stride = 1;
          for (int dim = host.num_dims - 1; dim >= 0; --dim) {
            host.strides[dim] = stride;
            stride *= host.shape[dim];
          }
          copy(host, result.scales, Backend::kCuda, stream);
        }
        int bad_rows = 0;
        std::int64_t first_bad = -1;
        for (std::int64_t i = 0; i < want.num_rows; ++i) {
          if (want.source_ranks[i] < 0) continue;
          const std::size_t bytes = std::size_t(c.hidden) * size;
          if (sources[i] != want.source_tokens[i] ||
              std::memcmp(&all[i * bytes], &want.values[i * bytes], bytes) != 0 ||
              (is_fp8(c.format) && std::memcmp(&all_scales[i * scale_bytes],
                                               &want.scales[i * scale_bytes], scale_bytes) != 0)) {
            if (bad_rows++ == 0) first_bad = i;
          }
        }
        if (bad_rows != 0)
          fail(rank, std::to_string(bad_rows) + " rows, first " + std::to_string(first_bad));
        meet.arrive_and_wait();
        TensorView target;
        if (c.zero_copy) {
          target = buffer.next_combine_buffer(result.handle, c.y_dtype);
        } else {
          target = c.layout == Layout::kPadded
                       ? TensorView(staged.view().data, c.y_dtype, {local, rows_each, c.hidden})
                       : TensorView(staged.view());
        }
        if (want.num_rows > 0) {
          TensorView flat(target.data, c.y_dtype, {want.num_rows, c.hidden});
          flat.strides[0] = target.strides[target.num_dims - 2];
          copy(flat, ConstTensorView(y[rank].data(), c.y_dtype, {want.num_rows, c.hidden}),
               Backend::kCuda, stream);
        }
        meet.arrive_and_wait();
        Hook hook = buffer.combine(target, weights, result.handle, out,
                                   {.return_hook = c.hook, .stream = stream});
        if (c.hook) hook();
        check_cuda(cudaStreamSynchronize(stream));
        buffer.check();
        if (t > 0) {
          std::vector<std::byte> got(combined[rank].size());
          copy(TensorView(got.data(), c.y_dtype, {t, c.hidden}), out, Backend::kCuda, stream);
          if (got != combined[rank]) fail(rank, "combined");
        }
      }
      meet.arrive_and_wait();
      check_cuda(cudaStreamDestroy(stream));
    } catch (const std::exception& error) {
      fail(rank, error.what());
      meet.arrive_and_drop();
    }
  });
  std::printf("%s %s%s\n", failures.empty() ? "ok  " : "FAIL", c.text().c_str(), failures.c_str());
  std::fflush(stdout);
  return failures.empty() ? 0 : 1;
}

int check(const std::string& only) {
  std::vector<Case> cases;
  cases.push_back({.ranks = 1, .hidden = 256, .max_tokens = 8});
  cases.push_back({.ranks = 2, .hidden = 7168, .max_tokens = 32});
  cases.push_back({.ranks = 2, .max_tokens = 16, .format = Format::kFp8});
  cases.push_back({.ranks = 2, .hidden = 1024, .max_tokens = 16, .placement = Placement::kSlotted});
  cases.push_back({.ranks = 2, .hidden = 1024, .max_tokens = 16, .zero_copy = false});
  cases.push_back({.ranks = 2,
                   .hidden = 1024,
                   .max_tokens = 16,
                   .placement = Placement::kSlotted,
                   .zero_copy = false,
                   .hook = true});
  cases.push_back({.ranks = 3,
                   .experts = 50,
                   .hidden = 1000,
                   .topk = 33,
                   .max_tokens = 17,
                   .tokens = {0, 1, 17},
                   .layout = Layout::kPacked,
                   .alignment = 16,
                   .wide = false});
  cases.push_back({.ranks = 8,
                   .hidden = 1001,
                   .max_tokens = 20,
                   .tokens = {20, 3, 0},
                   .format = Format::kFloat16,
                   .x_dtype = DType::kFloat16,
                   .y_dtype = DType::kFloat16});
  for (const Format format : {Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      cases.push_back(
          {.ranks = 2,
           .experts = 16,
           .hidden = format == Format::kFp8 ? 1000 : 1001,
           .topk = 4,
           .max_tokens = 9,
           .format = format,
           .x_dtype = dtype,
           .placement = dtype == DType::kFloat16 ? Placement::kSlotted : Placement::kPacked});
    }
  }
  cases.push_back({.ranks = 2,
                   .hidden = 1025,
                   .max_tokens = 16,
                   .format = Format::kFloat32,
                   .x_dtype = DType::kFloat32,
                   .zero_copy = false,
                   .y_dtype = DType::kFloat32});
  cases.push_back({.ranks = 2,
                   .experts = 300,
                   .hidden = 64,
                   .topk = 8,
                   .max_tokens = 1500,
                   .layout = Layout::kPacked});
  cases.push_back({.ranks = 5,
                   .experts = 288,
                   .hidden = 1,
                   .topk = 2,
                   .max_tokens = 33,
                   .layout = Layout::kPacked,
                   .alignment = 128});
  cases.push_back({.ranks = 2,
                   .experts = 16,
                   .hidden = 65536,
                   .topk = 2,
                   .max_tokens = 3,
                   .layout = Layout::kPacked});
  int failures = 0;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    if (!only.empty() && only != std::to_string(i)) continue;
    failures += run_case(cases[i], static_cast<unsigned>(i + 1));
  }
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int time_case(int ranks, int tokens, Format format, Placement placement, bool zero_copy, int sms) {
  const int hidden = 7168;
  const int topk = 8;
  const int experts = 64;
  std::barrier meet(ranks);
  std::mutex mutex;
  std::map<std::string, double> slowest;
  run_threads(ranks, [&](const Communicator& communicator) {
    const int rank = communicator.rank();
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    BufferOptions options{.backend = Backend::kCuda,
                          .num_experts = experts,
                          .max_tokens = tokens,
                          .max_hidden = hidden,
                          .max_topk = topk,
                          .timeout = std::chrono::seconds(2),
                          .num_sms = sms};
    options.padded_layout = true;
    const runtime::BufferPlan plan = runtime::make_plan(options, rank, ranks);
    const auto& backend = runtime::backend(Backend::kCuda);
    auto buffer = backend.make_buffer(communicator.bootstrap(), plan);
    std::mt19937 random(rank + 1);
    Array x(Backend::kCuda, DType::kBFloat16, {tokens, hidden});
    Array indices(Backend::kCuda, DType::kInt64, {tokens, topk});
    Array weights(Backend::kCuda, DType::kFloat32, {tokens, topk});
    Array out(Backend::kCuda, DType::kBFloat16, {tokens, hidden});
    const auto values = random_values(random, std::size_t(tokens) * hidden, DType::kBFloat16);
    copy(x, ConstTensorView(values.data(), DType::kBFloat16, {tokens, hidden}), Backend::kCuda,
         stream);
    std::vector<std::int64_t> idx;
    std::vector<float> w(std::size_t(tokens) * topk, 0.125F);
    for (int t = 0; t < tokens; ++t) {
      std::vector<int> all(experts);
      for (int e = 0; e < experts; ++e) all[e] = e;
      for (int k = 0; k < topk; ++k) {
        std::swap(all[k], all[k + random() % (experts - k)]);
        idx.push_back(all[k]);
      }
    }
    copy(indices, ConstTensorView(idx.data(), DType::kInt64, {tokens, topk}), Backend::kCuda,
         stream);
    copy(weights, ConstTensorView(w.data(), DType::kFloat32, {tokens, topk}), Backend::kCuda,
         stream);
    const std::int64_t local = plan.experts.num_local(rank);
    const std::int64_t rows = local * ranks * tokens;
    Array recv_x(Backend::kCuda, value_dtype(format),
                 {placement == Placement::kSlotted ? rows : 0, hidden});
    Array recv_s(Backend::kCuda, DType::kFloat32,
                 {placement == Placement::kSlotted && is_fp8(format) ? rows : 0, hidden / 128});
    Array y(Backend::kCuda, DType::kBFloat16, {zero_copy ? 0 : rows, hidden});
    std::uint64_t id = 0;
    const auto dispatch_call = [&](int half) {
      runtime::DispatchCall call;
      call.x = x;
      call.topk_idx = indices;
      call.row = {hidden, format};
      call.num_tokens = tokens;
      call.topk = topk;
      call.max_tokens = tokens;
      call.placement = placement;
      call.layout = Layout::kPadded;
      call.half = half;
      call.id = ++id;
      call.recv_x = recv_x;
      call.recv_scales = recv_s;
      call.stream = stream;
      return call;
    };
    const auto combine_call = [&](const runtime::DispatchCall& dispatch) {
      runtime::CombineCall call;
      call.y = zero_copy
                   ? ConstTensorView(buffer->own_block() + plan.block.combine_rows(dispatch.half),
                                     DType::kBFloat16, {rows, hidden})
                   : ConstTensorView(y);
      call.zero_copy = zero_copy;
      call.weights = weights;
      call.out = out;
      call.dtype = DType::kBFloat16;
      call.hidden = hidden;
      call.dispatch = dispatch;
      call.stream = stream;
      return call;
    };
    constexpr int kOps = 40;
    std::map<std::string, cudaGraphExec_t> graphs;
    const auto capture = [&](const std::string& what, const std::function<void()>& body) {
      cudaGraph_t graph = nullptr;
      check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      body();
      check_cuda(cudaStreamEndCapture(stream, &graph));
      check_cuda(cudaGraphInstantiate(&graphs[what], graph, 0));
      check_cuda(cudaGraphUpload(graphs[what], stream));
      check_cuda(cudaGraphDestroy(graph));
    };
    capture("dispatch", [&] {
      for (int i = 0; i < kOps; ++i) buffer->dispatch(dispatch_call(i & 1), runtime::Stage::kBoth);
    });
    capture("pair", [&] {
      for (int i = 0; i < kOps; ++i) {
        const auto call = dispatch_call(0);
        buffer->dispatch(call, runtime::Stage::kBoth);
        buffer->combine(combine_call(call), runtime::Stage::kBoth);
      }
    });
    const auto last = dispatch_call(0);
    capture("combine", [&] {
      buffer->dispatch(last, runtime::Stage::kBoth);
      for (int i = 0; i < kOps; ++i) buffer->combine(combine_call(last), runtime::Stage::kBoth);
    });
    cudaEvent_t begin = nullptr;
    cudaEvent_t end = nullptr;
    check_cuda(cudaEventCreate(&begin));
    check_cuda(cudaEventCreate(&end));
    check_cuda(cudaStreamSynchronize(stream));
    for (const char* what : {"dispatch", "combine", "pair"}) {
      std::vector<double> times;
      for (int replay = 0; replay < 25; ++replay) {
        meet.arrive_and_wait();
        check_cuda(cudaEventRecord(begin, stream));
        check_cuda(cudaGraphLaunch(graphs[what], stream));
        check_cuda(cudaEventRecord(end, stream));
        check_cuda(cudaStreamSynchronize(stream));
        buffer->check();
        float ms = 0;
        check_cuda(cudaEventElapsedTime(&ms, begin, end));
        if (replay >= 5) times.push_back(ms * 1000.0 / kOps);
      }
      const std::lock_guard lock(mutex);
      slowest[what] = std::max(slowest[what], median(times));
    }
    meet.arrive_and_wait();
    for (auto& [what, graph] : graphs) check_cuda(cudaGraphExecDestroy(graph));
    buffer.reset();
  });
  std::printf("R%-2d T%-4d %-5s %-8s %-9s dispatch %7.2f combine %7.2f pair %7.2f us\n", ranks,
              tokens, std::string(name(format)).c_str(), std::string(name(placement)).c_str(),
              zero_copy ? "zero-copy" : "staged", slowest["dispatch"], slowest["combine"],
              slowest["pair"]);
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (!args.empty() && args[0] == "check") return check(args.size() > 1 ? args[1] : "");
    if (args.size() >= 4 && args[0] == "time") {
      const bool slotted = std::find(args.begin(), args.end(), "slotted") != args.end();
      const bool staged = std::find(args.begin(), args.end(), "staged") != args.end();
      return time_case(std::stoi(args[1]), std::stoi(args[2]),
                       args[3] == "fp8" ? Format::kFp8 : Format::kBFloat16,
                       slotted ? Placement::kSlotted : Placement::kPacked, !staged,
                       args.size() > 4 && std::isdigit(args[4][0]) ? std::stoi(args[4]) : 0);
    }
  } catch (const std::exception& error) {
    std::printf("error: %s\n", error.what());
    return 1;
  }
  std::printf("gpu_probe check | time RANKS TOKENS FORMAT [SMS] [slotted] [staged]\n");
  return 2;
}
