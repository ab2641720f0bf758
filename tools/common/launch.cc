#include "common/launch.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <system_error>
#include <utility>

#include "common/network_hosts.h"

namespace tandem::tools {

namespace {

// A nameless file in memory that one child writes, a line per report, and the parent reads once the
// child is gone. Unlike a pipe it never fills up, and keeps what a killed child had written.
class ReportFile {
 public:
  ReportFile() : fd_(memfd_create("tandem-report", MFD_CLOEXEC)) {
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  }
  ~ReportFile() {
    if (fd_ >= 0) close(fd_);
  }
  ReportFile(ReportFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  ReportFile& operator=(ReportFile&&) = delete;

  void append(const nlohmann::json& report) const {
    const std::string line = report.dump() + '\n';
    std::size_t written = 0;
    while (written < line.size()) {
      const ssize_t size = write(fd_, line.data() + written, line.size() - written);
      if (size < 0 && errno != EINTR) {
        throw std::system_error(errno, std::generic_category(), "writing a report");
      }
      if (size > 0) written += static_cast<std::size_t>(size);
    }
  }

  [[nodiscard]] std::vector<nlohmann::json> read_all() const {
    std::string text;
    std::array<char, 65536> chunk;
    off_t offset = 0;
    while (true) {
      const ssize_t size = pread(fd_, chunk.data(), chunk.size(), offset);
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) break;
      text.append(chunk.data(), static_cast<std::size_t>(size));
      offset += size;
    }
    std::vector<nlohmann::json> reports;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (lines.eof()) break;  // no newline: the child died while writing it
      reports.push_back(nlohmann::json::parse(line));
    }
    return reports;
  }

 private:
  int fd_;
};

std::vector<RankOutcome> run_as_threads(int num_ranks, const CommunicatorOptions& options,
                                        const RankBody& body) {
  std::vector<RankOutcome> outcomes(static_cast<std::size_t>(num_ranks));
  const auto run = [&](const Communicator& communicator) {
    RankOutcome& outcome = outcomes[static_cast<std::size_t>(communicator.rank())];
    try {
      body(communicator, [&](const nlohmann::json& report) { outcome.reports.push_back(report); });
    } catch (const std::exception& error) {
      outcome.error = error.what();  // every rank's, where run_threads gives the first only
      throw;                         // for peers to hear of it
    }
  };
  try {
    run_threads(num_ranks, run, options);
  } catch (const std::exception&) {
    const auto ended_early = [](const RankOutcome& outcome) { return !outcome.error.empty(); };
    if (std::none_of(outcomes.begin(), outcomes.end(), ended_early)) throw;  // none could start
  }
  return outcomes;
}

std::string describe(const ProcessExit& exit) {
  if (!exit.error.empty()) return exit.error;
  if (exit.signal != 0) {
    return fmt::format("its process was ended by signal {} ({})", exit.signal,
                       strsignal(exit.signal));
  }
  if (exit.exit_code != 0) {
    return fmt::format("its process ended with exit code {}", exit.exit_code);
  }
  return {};
}

// `start` is run_processes, told how ranks meet.
template <typename Start>
std::vector<RankOutcome> run_as_processes(int num_ranks, const RankBody& body, const Start& start) {
  std::vector<ReportFile> files(static_cast<std::size_t>(num_ranks));
  std::fflush(nullptr);  // or children would print what is buffered once more
  const std::vector<ProcessExit> exits = start([&](const Communicator& communicator) {
    const ReportFile& file = files[static_cast<std::size_t>(communicator.rank())];
    body(communicator, [&](const nlohmann::json& report) { file.append(report); });
    return 0;
  });
  std::vector<RankOutcome> outcomes;
  for (std::size_t rank = 0; rank < files.size(); ++rank) {
    outcomes.push_back({.reports = files[rank].read_all(), .error = describe(exits[rank])});
  }
  return outcomes;
}

std::vector<RankOutcome> run_apart(int num_ranks, CommunicatorOptions options,
                                   const RankBody& body) {
  options.share_memory = false;
  return run_as_processes(num_ranks, body, [&](const auto& run_rank) {
    return run_processes(
        num_ranks,
        [&](const Communicator& together) {
          return run_rank(Communicator::from_all_gather(
              together.rank(), num_ranks,
              [&](std::span<const std::byte> message) { return together.all_gather(message); },
              options));
        },
        options);
  });
}

std::vector<RankOutcome> run_on_hosts(int num_ranks, int num_hosts,
                                      const CommunicatorOptions& options, const RankBody& body) {
  const NetworkHosts hosts(num_hosts);
  const std::string address = NetworkHosts::address(0) + ":7000";
  // Nobody else is on these hosts' network.
  const std::string secret = "ranks of one command";
  return run_as_processes(num_ranks, body, [&](const auto& run_rank) {
    return run_processes(
        num_ranks,
        [&](int rank) {
          hosts.enter(rank / (num_ranks / num_hosts));
          return Communicator::connect_across_hosts(address, secret, rank, num_ranks, options);
        },
        run_rank);
  });
}

}  // namespace

std::string_view name(Launch launch) {
  switch (launch) {
    case Launch::kThreads:
      return "threads";
    case Launch::kProcesses:
      return "processes";
    case Launch::kApart:
      return "apart";
    case Launch::kHosts:
      return "hosts";
  }
  return "unknown";
}

std::vector<RankOutcome> run_ranks(Launch launch, int num_ranks, std::chrono::milliseconds timeout,
                                   const RankBody& body, int num_hosts) {
  const CommunicatorOptions options{.timeout = timeout};
  if (launch == Launch::kThreads) return run_as_threads(num_ranks, options, body);
  if (launch == Launch::kApart) return run_apart(num_ranks, options, body);
  if (launch == Launch::kHosts) return run_on_hosts(num_ranks, num_hosts, options, body);
  return run_as_processes(num_ranks, body, [&](const auto& run_rank) {
    return run_processes(num_ranks, run_rank, options);
  });
}

}  // namespace tandem::tools
