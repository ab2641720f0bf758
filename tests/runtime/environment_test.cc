// Rank, size and name from what launchers set.
#include "runtime/environment.h"

#include <gtest/gtest.h>

#include <map>

#include "tandem/error.h"

namespace tandem::runtime {
namespace {

using Variables = std::map<std::string, std::string>;

Environment read(const Variables& variables) {
  return read_environment(
      [&variables](const char* variable) -> std::optional<std::string> {
        const auto found = variables.find(variable);
        if (found == variables.end()) return {};
        return found->second;
      },
      4711);
}

struct Case {
  const char* title;
  Variables variables;
  int rank;
  int size;
  const char* name;
};

TEST(Environment, IsReadAsEachLauncherSetsIt) {
  const std::vector<Case> cases = {
      {"itself",
       {{"TANDEM_RANK", "2"}, {"TANDEM_SIZE", "3"}, {"TANDEM_RENDEZVOUS", "my job"}},
       2,
       3,
       "my job"},
      {"torchrun",
       {{"RANK", "1"},
        {"WORLD_SIZE", "4"},
        {"LOCAL_WORLD_SIZE", "4"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", "29500"},
        {"TORCHELASTIC_RUN_ID", "none"},
        {"TORCHELASTIC_RESTART_COUNT", "0"}},
       1,
       4,
       "torchrun.127.0.0.1.29500.none.0"},
      {"torch.distributed without torchrun",
       {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "host"}, {"MASTER_PORT", "1"}},
       0,
       2,
       "torchrun.host.1"},
      {"torchrun with a name of one's own",
       {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TANDEM_RENDEZVOUS", "chosen"}},
       0,
       2,
       "chosen"},
      {"Open MPI",
       {{"OMPI_COMM_WORLD_RANK", "7"},
        {"OMPI_COMM_WORLD_SIZE", "8"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"},
        {"PMIX_NAMESPACE", "3456789"}},
       7,
       8,
       "mpirun.3456789"},
      {"Open MPI without PMIx",
       {{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_MCA_ess_base_jobid", "99"}},
       0,
       2,
       "mpirun.99"},
      {"MPICH", {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, 1, 2, "pmi.started-by-4711"},
      {"PMI with a job",
       {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_JOBID", "12.0"}},
       1,
       2,
       "pmi.12.0"},
      {"srun",
       {{"SLURM_PROCID", "3"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_STEP_NUM_NODES", "1"},
        {"SLURM_JOB_ID", "1234"},
        {"SLURM_STEP_ID", "5"}},
       3,
       4,
       "srun.1234.5"},
      {"srun of part of a job",
       {{"SLURM_PROCID", "1"},
        {"SLURM_NTASKS", "8"},
        {"SLURM_STEP_NUM_TASKS", "2"},
        {"SLURM_JOBID", "1234"},
        {"SLURM_STEPID", "6"}},
       1,
       2,
       "srun.1234.6"},
      {"TANDEM_* before torchrun",
       {{"TANDEM_RANK", "0"},
        {"TANDEM_SIZE", "1"},
        {"TANDEM_RENDEZVOUS", "a"},
        {"RANK", "1"},
        {"WORLD_SIZE", "4"}},
       0,
       1,
       "a"},
      {"mpirun inside a Slurm job",
       {{"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "1"},
        {"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"PMIX_NAMESPACE", "n"}},
       1,
       2,
       "mpirun.n"},
      {"a lone RANK of something else",
       {{"RANK", "captain"},
        {"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"PMIX_NAMESPACE", "n"}},
       1,
       2,
       "mpirun.n"},
      {"empty values are not set",
       {{"TANDEM_RANK", ""},
        {"TANDEM_RENDEZVOUS", ""},
        {"PMI_RANK", "0"},
        {"PMI_SIZE", "1"},
        {"PMI_JOBID", ""}},
       0,
       1,
       "pmi.started-by-4711"},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.title);
    const Environment environment = read(each.variables);
    EXPECT_EQ(environment.rank, each.rank);
    EXPECT_EQ(environment.size, each.size);
    EXPECT_EQ(environment.name, each.name);
  }
}

TEST(Environment, RanksOnSeveralHostsMeetAtAnAddress) {
  struct Met {
    std::string title;
    Variables variables;
    std::string address;  // empty: on one host
  };
  const std::vector<Met> cases = {
      {"given", {{"TANDEM_RANK", "1"}, {"TANDEM_SIZE", "2"}, {"TANDEM_ADDRESS", "a:9"}}, "a:9"},
      {"torchrun",
       {{"RANK", "3"},
        {"WORLD_SIZE", "4"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"MASTER_ADDR", "10.0.0.1"},
        {"MASTER_PORT", "29500"}},
       "10.0.0.1:29501"},
      {"torchrun on one host",
       {{"RANK", "1"},
        {"WORLD_SIZE", "2"},
        {"LOCAL_WORLD_SIZE", "2"},
        {"MASTER_ADDR", "10.0.0.1"},
        {"MASTER_PORT", "29500"}},
       ""},
      {"mpirun with an address",
       {{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "4"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
        {"TANDEM_ADDRESS", "one:29501"}},
       "one:29501"},
      {"srun",
       {{"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "4"},
        {"SLURM_STEP_NUM_NODES", "2"},
        {"SLURM_STEP_NODELIST", "node[03-04,7],login"},
        {"SLURM_JOB_ID", "12345678"}},
       "node03:25678"},
      {"srun, plain names",
       {{"SLURM_PROCID", "0"},
        {"SLURM_NTASKS", "2"},
        {"SLURM_STEP_NUM_NODES", "2"},
        {"SLURM_NODELIST", "left,right"},
        {"SLURM_JOBID", "7"}},
       "left:20007"},
  };
  for (Met each : cases) {
    SCOPED_TRACE(each.title);
    each.variables.emplace("TANDEM_SECRET", "s");
    const Environment environment = read(each.variables);
    EXPECT_EQ(environment.address, each.address);
    EXPECT_EQ(environment.secret, each.address.empty() ? "" : "s");
  }
}

struct Refused {
  Variables variables;
  std::vector<std::string> parts;  // of the error's text
  ErrorCode code = ErrorCode::kInvalidArgument;
};

TEST(Environment, ThatMakesNoSenseIsRefusedByName) {
  const std::vector<Refused> cases = {
      {{}, {"TANDEM_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"}},
      {{{"RANK", "1"}}, {"RANK is set, WORLD_SIZE is not"}},
      {{{"SLURM_NTASKS", "1"}}, {"SLURM_NTASKS is set, SLURM_PROCID is not"}},
      {{{"TANDEM_RANK", "1"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}},
       {"TANDEM_RANK is set, TANDEM_SIZE is not"}},
      {{{"TANDEM_SIZE", "1"}}, {"TANDEM_SIZE is set, TANDEM_RANK is not"}},
      {{{"TANDEM_RANK", "0"}, {"TANDEM_SIZE", "2"}}, {"TANDEM_RENDEZVOUS is not"}},
      {{{"TANDEM_RANK", "2"}, {"TANDEM_SIZE", "2"}, {"TANDEM_RENDEZVOUS", "x"}},
       {"TANDEM_RANK=2", "[0, 2)", "TANDEM_SIZE"}},
      {{{"TANDEM_RANK", "-1"}, {"TANDEM_SIZE", "2"}, {"TANDEM_RENDEZVOUS", "x"}},
       {"TANDEM_RANK=-1"}},
      {{{"TANDEM_RANK", "0"}, {"TANDEM_SIZE", "0"}, {"TANDEM_RENDEZVOUS", "x"}},
       {"TANDEM_SIZE=0", "1024"}},
      {{{"TANDEM_RANK", "0"}, {"TANDEM_SIZE", "1025"}, {"TANDEM_RENDEZVOUS", "x"}},
       {"TANDEM_SIZE=1025", "1024"}},
      {{{"RANK", "one"}, {"WORLD_SIZE", "2"}}, {"RANK=one"}},
      {{{"RANK", "1x"}, {"WORLD_SIZE", "2"}}, {"RANK=1x"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}}, {"WORLD_SIZE=99999999999"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}},
       {"MASTER_PORT", "TANDEM_RENDEZVOUS"}},
      {{{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}},
       {"PMIX_NAMESPACE", "TANDEM_RENDEZVOUS"}},
      {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_JOB_ID", "1"}},
       {"SLURM_STEP_ID", "SLURM_STEPID"}},
      {{{"RANK", "0"}, {"WORLD_SIZE", "16"}, {"LOCAL_WORLD_SIZE", "8"}},
       {"LOCAL_WORLD_SIZE=8 of 16", "TANDEM_ADDRESS"}},
      {{{"OMPI_COMM_WORLD_RANK", "0"},
        {"OMPI_COMM_WORLD_SIZE", "16"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"}},
       {"OMPI_COMM_WORLD_LOCAL_SIZE=8 of 16", "TANDEM_ADDRESS"}},
      {{{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "2"}},
       {"MPI_LOCALNRANKS=2 of 4", "TANDEM_ADDRESS"}},
      {{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"}},
       {"SLURM_STEP_NUM_NODES=2", "TANDEM_ADDRESS"}},
      {{{"TANDEM_RANK", "0"}, {"TANDEM_SIZE", "2"}, {"TANDEM_ADDRESS", "host:1"}},
       {"TANDEM_SECRET is not set", "host:1"}},
  };
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    try {
      read(cases[i].variables);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), cases[i].code) << error.what();
      for (const auto& part : cases[i].parts) {
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
            << "'" << part << "' in: " << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace tandem::runtime
