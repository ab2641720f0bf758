// Reading rank, size and rendezvous name from what launchers set.
#include "runtime/environment.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <vector>

#include "tandem/error.h"

namespace tandem::runtime {
namespace {

struct Launcher {
  const char* title;
  const char* rank;
  std::vector<const char*> sizes;  // in order of preference
  const char* local_size;          // ranks on this host; or null
  const char* num_nodes;           // hosts; or null
};

const std::vector<Launcher>& launchers() {
  static const std::vector<Launcher> all = {
      {"tandem", "TANDEM_RANK", {"TANDEM_SIZE"}, nullptr, nullptr},
      {"torchrun", "RANK", {"WORLD_SIZE"}, "LOCAL_WORLD_SIZE", nullptr},
      {"mpirun",
       "OMPI_COMM_WORLD_RANK",
       {"OMPI_COMM_WORLD_SIZE"},
       "OMPI_COMM_WORLD_LOCAL_SIZE",
       nullptr},
      {"pmi", "PMI_RANK", {"PMI_SIZE"}, "MPI_LOCALNRANKS", nullptr},
      {"srun",
       "SLURM_PROCID",
       {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
       nullptr,
       "SLURM_STEP_NUM_NODES"},
  };
  return all;
}

// Jobs of one host listen on ports from here on, below those that systems give out by themselves.
constexpr int kFirstPort = 20000;
constexpr int kNumPorts = 10000;

class Reader {
 public:
  Reader(const Lookup& lookup, long parent_process)
      : lookup_(lookup), parent_process_(parent_process) {}

  [[nodiscard]] Environment read() const {
    std::string half_set;
    for (const Launcher& launcher : launchers()) {
      const bool has_rank = get(launcher.rank).has_value();
      const char* const size = first_set(launcher.sizes);
      if (has_rank && size != nullptr) return read(launcher, size);
      if (has_rank || size != nullptr) {
        // A lone RANK or SLURM_NTASKS may mean something else; a lone variable of ours may not.
        const std::string complaint = std::string(has_rank ? launcher.rank : size) + " is set, " +
                                      (has_rank ? launcher.sizes.front() : launcher.rank) +
                                      " is not";
        if (launcher.rank == launchers().front().rank) refuse(complaint);
        half_set += "; " + complaint;
      }
    }
    refuse(
        "rank and size are not in the environment: set TANDEM_RANK, TANDEM_SIZE and "
        "TANDEM_RENDEZVOUS, or start with torchrun (RANK, WORLD_SIZE), mpirun "
        "(OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, or PMI_RANK, PMI_SIZE) or srun "
        "(SLURM_PROCID, SLURM_NTASKS)" +
        half_set);
  }

 private:
  [[noreturn]] static void refuse(const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, message);
  }

  [[nodiscard]] std::optional<std::string> get(const char* variable) const {
    auto value = lookup_(variable);
    if (value && value->empty()) value.reset();
    return value;
  }

  [[nodiscard]] const char* first_set(const std::vector<const char*>& variables) const {
    for (const char* const variable : variables) {
      if (get(variable)) return variable;
    }
    return nullptr;
  }

  [[nodiscard]] int integer(const char* variable) const {
    const std::string text = *get(variable);
    int value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size()) {
      refuse(std::string(variable) + "=" + text + " is not a number that can be used");
    }
    return value;
  }

  [[nodiscard]] Environment read(const Launcher& launcher, const char* size_variable) const {
    Environment environment{
        .rank = integer(launcher.rank), .size = integer(size_variable), .name = {}};
    if (environment.size < 1 || environment.size > kMaxRanks) {
      refuse(std::string(size_variable) + "=" + std::to_string(environment.size) +
             ", must be from 1 to " + std::to_string(kMaxRanks));
    }
    if (environment.rank < 0 || environment.rank >= environment.size) {
      refuse(std::string(launcher.rank) + "=" + std::to_string(environment.rank) +
             ", must be in [0, " + size_variable + ") = [0, " + std::to_string(environment.size) +
             ")");
    }
    const auto address = get("TANDEM_ADDRESS");
    const std::string elsewhere = says_other_hosts(launcher, environment.size);
    if (address || !elsewhere.empty()) {
      environment.address = address ? *address : launch_address(launcher, elsewhere);
      const auto secret = get("TANDEM_SECRET");
      if (!secret) {
        refuse("TANDEM_SECRET is not set: ranks that meet at an address (" + environment.address +
               ") need one secret, the same on all hosts");
      }
      environment.secret = *secret;
      return environment;
    }
    const auto given = get("TANDEM_RENDEZVOUS");
    environment.name = given ? *given : launch_name(launcher);
    return environment;
  }

  // The variable that says that ranks are on other hosts, with its value; empty if none does.
  [[nodiscard]] std::string says_other_hosts(const Launcher& launcher, int size) const {
    if (launcher.local_size != nullptr && get(launcher.local_size) &&
        integer(launcher.local_size) != size) {
      return std::string(launcher.local_size) + "=" + *get(launcher.local_size) + " of " +
             std::to_string(size) + " ranks";
    }
    if (launcher.num_nodes != nullptr && get(launcher.num_nodes) &&
        integer(launcher.num_nodes) != 1) {
      return std::string(launcher.num_nodes) + "=" + *get(launcher.num_nodes);
    }
    return {};
  }

  // Where the launcher says that rank 0 is.
  [[nodiscard]] std::string launch_address(const Launcher& launcher,
                                           const std::string& elsewhere) const {
    const std::string title = launcher.title;
    if (title == "torchrun" && get("MASTER_ADDR") && get("MASTER_PORT")) {
      return *get("MASTER_ADDR") + ":" + std::to_string(integer("MASTER_PORT") + 1);
    }
    if (title == "srun") {
      const char* const nodes = first_set({"SLURM_STEP_NODELIST", "SLURM_NODELIST"});
      const char* const job = first_set({"SLURM_JOB_ID", "SLURM_JOBID"});
      if (nodes != nullptr && job != nullptr) {
        return first_host(*get(nodes)) + ":" +
               std::to_string(kFirstPort + integer(job) % kNumPorts);
      }
    }
    refuse("ranks are on several hosts (" + elsewhere +
           "): set TANDEM_ADDRESS to host:port, the host that of rank 0");
  }

  // "node[03-05,9],login" -> "node03".
  [[nodiscard]] static std::string first_host(const std::string& list) {
    const std::size_t end = list.find_first_of(",[");
    std::string host = list.substr(0, end);
    if (end != std::string::npos && list[end] == '[') {
      const std::size_t number = end + 1;
      host += list.substr(number, list.find_first_of("-,]", number) - number);
    }
    return host;
  }

  [[nodiscard]] std::string launch_name(const Launcher& launcher) const {
    const std::string title = launcher.title;
    if (title == "torchrun") {
      std::string name = title;
      for (const char* const part : {"MASTER_ADDR", "MASTER_PORT"}) {
        name += "." + required({part}, title);
      }
      for (const char* const part : {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}) {
        if (const auto value = get(part)) name += "." + *value;
      }
      return name;
    }
    if (title == "mpirun") {
      return title + "." + required({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}, title);
    }
    if (title == "pmi") {
      const char* const job = first_set({"PMIX_NAMESPACE", "PMI_JOBID"});
      return job != nullptr ? title + "." + *get(job)
                            : title + ".started-by-" + std::to_string(parent_process_);
    }
    if (title == "srun") {
      return title + "." + required({"SLURM_JOB_ID", "SLURM_JOBID"}, title) + "." +
             required({"SLURM_STEP_ID", "SLURM_STEPID"}, title);
    }
    refuse("TANDEM_RANK and TANDEM_SIZE are set, TANDEM_RENDEZVOUS is not");
  }

  // The first of `variables` that is set.
  [[nodiscard]] std::string required(const std::vector<const char*>& variables,
                                     const std::string& title) const {
    if (const char* const variable = first_set(variables)) return *get(variable);
    std::string names;
    for (const char* const variable : variables) {
      names += (names.empty() ? "" : " or ") + std::string(variable);
    }
    refuse(names + " is not set, which gives the ranks of " + title +
           " a name to meet under; set TANDEM_RENDEZVOUS to a name of your own");
  }

  const Lookup& lookup_;
  long parent_process_;
};

}  // namespace

Environment read_environment(const Lookup& lookup, long parent_process) {
  return Reader(lookup, parent_process).read();
}

Environment read_process_environment() {
  return read_environment(
      [](const char* variable) -> std::optional<std::string> {
        const char* const value = std::getenv(variable);
        if (value == nullptr) return {};
        return value;
      },
      ::getppid());
}

}  // namespace tandem::runtime
