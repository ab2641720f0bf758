// A communicator: which rank am I, of how many, and how do ranks exchange small messages while they
// set things up. Nothing of it is used on the path of a dispatch or combine.
//
// Ranks are threads of one process (run_threads), processes that the library forks (run_processes),
// or processes started by others (from_environment, connect, from_all_gather).
//
// Thread safety: a Communicator belongs to one rank and is used by one thread at a time. Copies
// share one connection, closed when the last copy, and the last Buffer made from it, is gone.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tandem/error.h"

namespace tandem {

namespace runtime {
class Bootstrap;
}

struct CommunicatorOptions {
  // How long set-up waits for ranks that have not come, and any set-up exchange for its slowest
  // rank.
  std::chrono::milliseconds timeout{30'000};

  // false: this rank shares no memory with others, as if it were alone on a host of its own; all it
  // sends goes over the network. For trying the network on one machine. Looked at by
  // from_all_gather and connect_across_hosts, and needs what they need between hosts.
  bool share_memory = true;

  // Where ranks are on several hosts: what processes must know that join a buffer later
  // (Buffer::join_across_hosts). Looked at by from_all_gather; connect_across_hosts has its own.
  std::string secret = {};
};

class Communicator {
 public:
  // Takes rank, size and rendezvous name from the environment, in this order of preference:
  //   TANDEM_RANK, TANDEM_SIZE, TANDEM_RENDEZVOUS;
  //   torchrun: RANK, WORLD_SIZE, and MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID as the name;
  //   mpirun: OMPI_COMM_WORLD_RANK/SIZE or PMI_RANK/PMI_SIZE, and the job's identifier as the name;
  //   srun: SLURM_PROCID, SLURM_NTASKS, and the job and step identifiers as the name.
  // TANDEM_RENDEZVOUS overrides the name in every case. If the launcher says that ranks are on
  // other hosts, or TANDEM_ADDRESS is set, they meet as with connect_across_hosts, at
  // TANDEM_ADDRESS or where torchrun or srun say that rank 0 is, and TANDEM_SECRET must be set.
  // docs/starting.md has every variable. Throws kInvalidArgument naming the variables if none of
  // these is set or a value makes no sense; kTimeout naming the ranks that did not come.
  static Communicator from_environment(const CommunicatorOptions& options = {});

  // Meets the other ranks on this host under `name` (any text; one name serves one group at a time
  // and one user: processes of other users cannot join). Ranks may be threads and processes in any
  // mixture. Throws kInvalidArgument for a rank outside [0, size), a size outside [1, kMaxRanks],
  // a rank or size that contradicts a peer's (on all ranks), or a name that another user holds;
  // kTimeout naming the ranks that did not come.
  static Communicator connect(const std::string& name, int rank, int size,
                              const CommunicatorOptions& options = {});

  // Gathers one message from every rank, in rank order; what torch.distributed or mpi4py provide.
  using AllGather = std::function<std::vector<std::vector<std::byte>>(std::span<const std::byte>)>;

  // Meets the other ranks through a gathering function that the caller already has; it is called
  // once if all ranks are on one host, else twice. What it carries should not be public: it is what
  // lets ranks trust each other. Throws kUnreachable naming all ranks that are not on rank 0's
  // host, if this build has no network (docs/network.md).
  static Communicator from_all_gather(int rank, int size, const AllGather& all_gather,
                                      const CommunicatorOptions& options = {});

  // Meets the other ranks, on this host or others, at `address` ("host:port"), where rank 0
  // listens until all have come. Only who knows `secret` is let in. Throws kUnsupported if this
  // build has no network; kInvalidArgument for an address that makes no sense, an empty or another
  // secret, ranks that contradict each other; kTimeout naming the ranks that did not come.
  static Communicator connect_across_hosts(const std::string& address, const std::string& secret,
                                           int rank, int size,
                                           const CommunicatorOptions& options = {});

  [[nodiscard]] int rank() const;
  [[nodiscard]] int size() const;

  // Set-up exchanges, collective over all ranks, bounded by the options' timeout (if ranks gave
  // different ones, the shortest): kTimeout names the missing ranks, kPeerLost a rank that is gone,
  // kMismatch a rank that calls another exchange. What one rank gets all get, at the latest from
  // their next exchange: a rank to which everybody's part came before the word of a peer that gave
  // up may pass that one, and no later one. They get it again from all later calls. A message may
  // have up to 64 MiB (kInvalidArgument).
  [[nodiscard]] std::vector<std::vector<std::byte>> all_gather(
      std::span<const std::byte> message) const;
  void barrier() const;

  // For the library's own use.
  explicit Communicator(std::shared_ptr<runtime::Bootstrap> bootstrap);
  [[nodiscard]] const std::shared_ptr<runtime::Bootstrap>& bootstrap() const { return bootstrap_; }

 private:
  std::shared_ptr<runtime::Bootstrap> bootstrap_;
};

// Runs `body` once per rank, each on a thread of its own, and returns when all have ended. The
// exception of the lowest rank that threw is rethrown; peers that waited for a rank that threw get
// kPeerLost with its words.
void run_threads(int num_ranks, const std::function<void(const Communicator&)>& body,
                 const CommunicatorOptions& options = {});

// What became of a rank's process.
struct ProcessExit {
  int exit_code = 0;  // as given to exit(); body's return value, or 1 after an exception
  int signal = 0;     // the signal that ended it, or 0
  std::string error;  // what() of the exception that ended `body`, if one did
};

// Runs `body` once per rank, each in a process forked from this one, and waits for all. Children do
// not outlive this process. Each ends by _exit after flushing its output: no handlers of atexit
// run. Call it before starting threads or touching a GPU in the calling process.
std::vector<ProcessExit> run_processes(int num_ranks,
                                       const std::function<int(const Communicator&)>& body,
                                       const CommunicatorOptions& options = {});

// The same, for ranks that meet in a way of their own: `connect` runs in each rank's process, given
// its rank.
std::vector<ProcessExit> run_processes(int num_ranks,
                                       const std::function<Communicator(int)>& connect,
                                       const std::function<int(const Communicator&)>& body);

}  // namespace tandem
