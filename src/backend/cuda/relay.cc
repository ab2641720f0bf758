#include "backend/cuda/relay.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "backend/cuda/cuda_check.h"
#include "backend/cuda/device_memory.h"
#include "runtime/deadline.h"
#include "runtime/failure.h"
#include "tandem/error.h"

namespace tandem::cuda {
namespace {

using layout::Argument;
using layout::Word;
using std::chrono::microseconds;
using Clock = std::chrono::steady_clock;

// How long a buffer that goes waits for the network to have read what it was given.
constexpr std::chrono::milliseconds kLeaveTimeout{2000};

// A rank's rows for one peer have one arrival word, whatever the number of blocks that wrote them:
// the peer is told that there was one block.
constexpr std::uint32_t kBlocksOfRelay = 1;

// Operations after which the gate is moved up: its epoch is never half of all epochs away.
constexpr layout::Epoch kGateTurn = layout::Epoch{1} << 20;

std::vector<int> ranks_on_other_hosts(runtime::Bootstrap& bootstrap) {
  const std::vector<int> here = bootstrap.host_ranks();
  std::vector<int> elsewhere;
  for (int rank = 0; rank < bootstrap.size(); ++rank) {
    if (!std::binary_search(here.begin(), here.end(), rank)) elsewhere.push_back(rank);
  }
  return elsewhere;
}

}  // namespace

Relay::Relay(int device, const runtime::BufferPlan& plan, runtime::Bootstrap& bootstrap,
             std::shared_ptr<std::byte> block,
             std::function<std::optional<runtime::Failure>()> own_failure)
    : device_(device),
      plan_(plan),
      outbox_(plan.block),
      remote_(ranks_on_other_hosts(bootstrap)),
      block_(std::move(block)),
      own_failure_(std::move(own_failure)),
      outbox_memory_(allocate_mapped_host(device, outbox_.size_bytes())),
      one_(allocate_mapped_host(device, sizeof(std::uint32_t))),
      carrier_(std::make_shared<DeviceCarrier>(device, plan, remote_, block_)),
      reader_(*reinterpret_cast<RequestRing*>(outbox_memory_.get() + outbox_.ring())),
      audience_(plan.num_ranks),
      gate_(plan.options.first_epoch) {
  const DeviceScope scope(device_);
  void* on_device = nullptr;
  check_cuda(cudaHostGetDevicePointer(&on_device, outbox_memory_.get(), 0),
             "cudaHostGetDevicePointer");
  device_outbox_ = static_cast<std::byte*>(on_device);
  device_view_ = allocate_device(device_, sizeof(RemoteView));
  const std::uint32_t one = 1;
  std::memcpy(one_.get(), &one, sizeof one);
  // Each peer gets as many rows back as it has sent: at most what a rank sends.
  bounce_bytes_ = carrier_->landing_bytes() * std::ssize(remote_);
  bounce_ = allocate_mapped_host(device_, std::max<std::int64_t>(2 * bounce_bytes_, 1));
  carrier_->keep(outbox_memory_);
  carrier_->keep(bounce_);
  stream_ = make_copy_stream();
  for (Sent& sent : sent_) {
    sent.counts.resize(static_cast<std::size_t>(plan_.experts.num_experts()));
  }
  for (auto& landed : landed_) {
    landed.resize(static_cast<std::size_t>(plan_.experts.num_local(plan_.rank)) *
                  static_cast<std::size_t>(plan_.num_ranks));
  }
  peers_ = bootstrap.network()->open({.block = nullptr,
                                      .block_bytes = plan_.block.size_bytes(),
                                      .control_bytes = plan_.block.control_bytes(),
                                      .staging_bytes = 0,
                                      .landing_bytes = carrier_->landing_bytes(),
                                      .wake = [carrier = carrier_.get()] { carrier->wake(); },
                                      .carrier = carrier_});
  carrier_->set_has_left(
      [peers = peers_.get()](int peer, int parity) { return peers->has_left(peer, parity); });
}

Relay::~Relay() {
  stopping_.store(true, std::memory_order_relaxed);
  if (thread_.joinable()) thread_.join();
  // Memory that the network still reads would be freed by its thread, which would wait for the GPU.
  const runtime::Deadline deadline = runtime::Deadline::after(kLeaveTimeout);
  const auto all_has_left = [&] {
    return std::all_of(remote_.begin(), remote_.end(), [&](int peer) {
      return peers_->lost(peer) || (peers_->has_left(peer, 0) && peers_->has_left(peer, 1));
    });
  };
  while (!all_has_left() && !deadline.passed()) std::this_thread::sleep_for(microseconds(100));
  carrier_->set_has_left({});
  peers_.reset();
  warn_cuda(cudaStreamDestroy(stream_), "cudaStreamDestroy");
}

void Relay::fill(BufferView& view) {
  const DeviceScope scope(device_);
  const RemoteView remote{.layout = outbox_,
                          .outbox = device_outbox_,
                          .landing = {carrier_->device_landing(),
                                      carrier_->device_landing() + carrier_->landing_bytes()},
                          .lost = carrier_->device_lost()};
  check_cuda(cudaMemcpy(device_view_.get(), &remote, sizeof remote, cudaMemcpyHostToDevice),
             "cudaMemcpy");
  view.across_devices = 1;
  view.remote = reinterpret_cast<const RemoteView*>(device_view_.get());
  device_failed_ = &view.state->failed;
}

void Relay::start() {
  thread_ = std::thread([this] { run(); });
}

void Relay::set_newest_view(std::function<runtime::View()> newest_view) {
  const std::lock_guard lock(turn_);
  newest_view_ = std::move(newest_view);
  if (newest_view_) view_ = newest_view_();
}

std::optional<runtime::Failure> Relay::trouble() const {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

std::string Relay::why_lost(int peer) const { return peers_->lost(peer).value_or("is lost"); }

// A kernel cannot wake a thread, so the thread looks: at every turn while there is work, less and
// less often while there is none.
void Relay::pause(Clock::time_point last_work) const {
  const auto idle = Clock::now() - last_work;
  if (idle < microseconds(200)) {
    peers_->progress();
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(idle < std::chrono::milliseconds(20) ? microseconds(20)
                                : idle < std::chrono::seconds(2)     ? microseconds(200)
                                                                     : microseconds(2000));
  }
}

void Relay::run() {
  warn_cuda(cudaSetDevice(device_), "cudaSetDevice");
  auto last_work = Clock::now();
  for (;;) {
    // Looked at first: what was asked for before is done before.
    const bool stopping = stopping_.load(std::memory_order_relaxed);
    {
      const std::lock_guard lock(turn_);
      if (!is_resting_ && work()) last_work = Clock::now();
    }
    if (stopping) return;
    pause(last_work);
  }
}

bool Relay::work() {
  bool was_asked = false;
  try {
    while (const std::optional<Request> request = reader_.take()) {
      was_asked = true;
      handle(*request);
    }
  } catch (const Error& error) {
    fail(error.message());
  }
  watch();
  return was_asked;
}

// What has failed here is told to the peers, what has failed there to the kernels.
void Relay::watch() {
  if (!has_told_) {
    if (const auto failure = own_failure_()) {
      has_told_ = true;
      peers_->send_failure(*failure);
    }
  }
  if (peers_->failed()) stop_kernels();
  if (const auto problem = carrier_->problem()) fail(*problem);
}

void Relay::fail(const std::string& what) {
  const runtime::Failure failure{
      .info = {.code = ErrorCode::kPeerLost, .peer = plan_.rank},
      .message = "rank " + std::to_string(plan_.rank) + " can send no more: " + what};
  {
    const std::lock_guard lock(mutex_);
    if (trouble_) return;
    trouble_ = failure;
  }
  stop_kernels();
  if (!std::exchange(has_told_, true)) peers_->send_failure(failure);
}

void Relay::stop_kernels() {
  if (std::exchange(has_stopped_, true)) return;
  warn_cuda(cudaMemcpyAsync(device_failed_, one_.get(), sizeof(std::uint32_t),
                            cudaMemcpyHostToDevice, stream_),
            "cudaMemcpyAsync");
}

void Relay::tell_roster_word(int rank, Word word) {
  const runtime::RemotePeers::WordRun run{plan_.block.roster(rank), {&word, 1}};
  for (const int peer : remote_) peers_->send_words(peer, {&run, 1});
}

// What was asked for behind a number that a failed kernel has left out is not done. Messages that
// are dropped come from operations that have failed or that this rank took no part in: ranks are
// two apart at most, and begin anew two operations beyond the last that anybody has come to.
void Relay::rest(layout::Epoch from) {
  const DeviceScope scope(device_);
  {
    const std::lock_guard lock(turn_);
    if (!is_resting_) static_cast<void>(work());
    is_resting_ = true;
    close_to(from);
  }
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  carrier_->forget();
  carrier_->await_copies();
}

void Relay::close_to(layout::Epoch from) {
  gate_ = from;
  for (const int peer : remote_) peers_->admit(peer, from);
}

void Relay::await_leaving(std::span<const int> active) const {
  const auto limit = plan_.options.timeout;
  const auto deadline =
      runtime::Deadline::after(std::chrono::ceil<std::chrono::milliseconds>(limit));
  for (const int peer : remote_) {
    const auto is_reading = [&] {
      return !peers_->lost(peer) && !(peers_->has_left(peer, 0) && peers_->has_left(peer, 1));
    };
    while (std::ranges::find(active, peer) != active.end() && is_reading()) {
      if (deadline.passed()) {
        throw Error(ErrorInfo{.code = ErrorCode::kTimeout,
                              .phase = Phase::kMembership,
                              .peer = peer,
                              .limit = limit},
                    "rank " + std::to_string(peer) +
                        " does not take what was sent to it before operations failed");
      }
      std::this_thread::sleep_for(microseconds(20));
    }
  }
}

void Relay::resume() {
  const std::lock_guard lock(turn_);
  reader_.restart();
  has_told_ = has_stopped_ = is_resting_ = false;
  const std::lock_guard trouble_lock(mutex_);
  trouble_.reset();
}

void Relay::handle(const Request& request) {
  if (newest_view_) view_ = newest_view_();
  if (request.epoch - gate_ > kGateTurn) close_to(request.epoch - runtime::kLongAgo);
  switch (request.kind) {
    case RequestKind::kHeader:
      send_header(request);
      return;
    case RequestKind::kRows:
      if (request.has_rows != 0) send_rows(request);
      send_arrived(request.epoch);
      return;
    case RequestKind::kReady:
      if (request.has_rows != 0) send_outputs(request);
      send_ready(request);
      return;
    case RequestKind::kCompleted:
      if (request.operation == Operation::kDispatch) plan_landed(request);
      send_completed(request.epoch);
      return;
  }
}

// Those who take part from the next operation on are told too.
void Relay::send_completed(layout::Epoch epoch) {
  const Word done = layout::make_word(epoch, 0);
  const runtime::RemotePeers::WordRun run{plan_.block.completed(plan_.rank), {&done, 1}};
  for (const int peer : remote_) {
    if (takes_part(peer, epoch) || takes_part(peer, epoch + 1)) peers_->send_words(peer, {&run, 1});
  }
}

bool Relay::takes_part(int peer, layout::Epoch epoch) {
  return audience_.takes_part(view_, peer, epoch);
}

void Relay::send_words(layout::Epoch epoch, std::span<const runtime::RemotePeers::WordRun> runs) {
  for (const int peer : remote_) {
    if (takes_part(peer, epoch)) peers_->send_words(peer, runs);
  }
}

void Relay::send_arrived(layout::Epoch epoch) {
  const Word done = layout::make_word(epoch, 0);
  send_words(
      epoch,
      {{{plan_.block.arrived(layout::parity(epoch), plan_.rank, kFirstBlockWord), {&done, 1}}}});
}

// The header last: it releases the others.
void Relay::send_ready(const Request& request) {
  const int parity = layout::parity(request.epoch);
  std::array<Word, layout::kNumArguments> arguments;
  for (int which = 0; which < layout::kNumArguments; ++which) {
    arguments[which] = layout::make_word(request.epoch, request.arguments[which]);
  }
  const Word header = layout::make_word(
      request.epoch, layout::encode(layout::Header{request.operation, request.half,
                                                   layout::hash_arguments(request.arguments)}));
  const runtime::RemotePeers::WordRun runs[] = {
      {plan_.block.argument(parity, plan_.rank, Argument{}), arguments},
      {plan_.block.header(parity, plan_.rank), {&header, 1}}};
  send_words(request.epoch, runs);
}

void Relay::send_header(const Request& request) {
  const int parity = layout::parity(request.epoch);
  const int num_experts = plan_.experts.num_experts();
  Sent& sent = sent_[parity];
  std::copy_n(request.arguments, layout::kNumArguments, sent.arguments.begin());
  const std::int64_t counts_at = plan_.block.count(parity, plan_.rank, 0);
  const std::span<const Word> counts{in_outbox<Word>(counts_at),
                                     static_cast<std::size_t>(num_experts)};
  for (int expert = 0; expert < num_experts; ++expert) {
    sent.counts[expert] = static_cast<std::int32_t>(layout::value_of(counts[expert]));
  }
  const Word num_blocks = layout::make_word(request.epoch, kBlocksOfRelay);
  const runtime::RemotePeers::WordRun runs[] = {
      {counts_at, counts},
      {plan_.block.arrived(parity, plan_.rank, kNumBlocksWord), {&num_blocks, 1}}};
  send_words(request.epoch, runs);
  send_ready(request);
}

void Relay::send_rows(const Request& request) {
  const int parity = layout::parity(request.epoch);
  const Sent& sent = sent_[parity];
  const auto shape = layout::decode_shape(sent.arguments[static_cast<int>(Argument::kShape)]);
  const std::int64_t max_tokens = sent.arguments[static_cast<int>(Argument::kMaxTokens)];
  const std::int64_t pitch =
      layout::RowShape{shape.hidden, static_cast<Format>(shape.element)}.pitch();
  const bool slotted = shape.placement == Placement::kSlotted;
  const std::byte* const rows = outbox_memory_.get() + outbox_.rows(parity);
  const auto* const sources = in_outbox<std::int32_t>(outbox_.sources(parity));
  const auto* const first_rows = in_outbox<std::uint32_t>(outbox_.first_rows(parity));
  const auto* const halves = in_outbox<std::uint32_t>(outbox_.halves(parity));
  const auto is_remote = [&](int rank) {
    return std::binary_search(remote_.begin(), remote_.end(), rank) &&
           takes_part(rank, request.epoch);
  };

  std::int64_t start = 0;
  for (int owner = 0; owner < plan_.num_ranks; ++owner) {
    std::int64_t num_rows = 0;
    for (const std::int32_t expert : plan_.experts.experts_of(owner)) {
      num_rows += sent.counts[expert];
    }
    // More than its part of a landing region: all ranks see that in the counts.
    const bool fits =
        !slotted || num_rows <= max_tokens * std::min(shape.topk, plan_.experts.num_local(owner));
    const int half = slotted ? 0 : static_cast<int>(halves[owner]);
    const std::int64_t rows_at =
        slotted ? plan_.block.landing_rows(parity) : plan_.block.view_rows(half);
    const std::int64_t sources_at =
        slotted ? plan_.block.landing_sources(parity) : plan_.block.view_sources(half);
    for (const std::int32_t expert : plan_.experts.experts_of(owner)) {
      const std::int64_t count = sent.counts[expert];
      if (is_remote(owner) && fits && count > 0) {
        peers_->send_to_block(
            owner,
            {.rows = rows + start * pitch,
             .count = count,
             .pitch = pitch,
             .offset = rows_at + first_rows[expert] * pitch,
             .epoch = request.epoch},
            {sources + start, static_cast<std::size_t>(count)},
            sources_at + first_rows[expert] * static_cast<std::int64_t>(sizeof(std::int32_t)));
      }
      start += count;
    }
  }
}

// Once the dispatch has completed, all counts are here; later dispatches of its parity will
// overwrite them.
void Relay::plan_landed(const Request& request) {
  const int parity = layout::parity(request.epoch);
  for (const int source : remote_) {
    std::int64_t start = 0;
    for (const std::int32_t expert : plan_.experts.by_rank()) {
      if (plan_.experts.owner(expert) == plan_.rank) {
        landed_[request.half][static_cast<std::size_t>(plan_.experts.local_index(expert)) *
                                  static_cast<std::size_t>(plan_.num_ranks) +
                              static_cast<std::size_t>(source)] = start;
      }
      start += layout::value_of(carrier_->word(plan_.block.count(parity, source, expert)));
    }
  }
}

void Relay::send_outputs(const Request& request) {
  const int parity = layout::parity(request.epoch);
  const auto shape = layout::decode_shape(request.arguments[static_cast<int>(Argument::kShape)]);
  const std::int64_t pitch = layout::combine_pitch(shape.hidden, static_cast<DType>(shape.element));
  const std::byte* const region = block_.get() + plan_.block.combine_rows(request.half);
  const auto* const offsets = in_outbox<std::int64_t>(outbox_.offsets(request.half));
  const auto* const ranges = in_outbox<std::int64_t>(outbox_.ranges(request.half));
  std::byte* const bounce = bounce_.get() + parity * bounce_bytes_;
  const int num_local = plan_.experts.num_local(plan_.rank);

  struct Run {
    int source;
    runtime::RemotePeers::Rows rows;
  };
  std::vector<Run> runs;
  std::int64_t used = 0;
  for (const int source : remote_) {
    for (int local = 0; local < num_local && takes_part(source, request.epoch); ++local) {
      const std::int64_t at = std::int64_t{local} * plan_.num_ranks + source;
      const std::int64_t count = ranges[at] & 0xffffffff;
      if (count == 0) continue;
      const std::int64_t bytes = count * pitch;
      if (bytes > bounce_bytes_ - used) {
        throw Error(ErrorCode::kMismatch, "more rows came than ranks can have sent");
      }
      check_cuda(
          cudaMemcpyAsync(bounce + used, region + (offsets[local] + (ranges[at] >> 32)) * pitch,
                          static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream_),
          "cudaMemcpyAsync");
      runs.push_back({source,
                      {.rows = bounce + used,
                       .count = count,
                       .pitch = pitch,
                       .offset = landed_[request.half][static_cast<std::size_t>(at)] * pitch,
                       .epoch = request.epoch}});
      used += bytes;
    }
  }
  check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  for (const Run& run : runs) peers_->send_to_landing(run.source, run.rows);
}

}  // namespace tandem::cuda
