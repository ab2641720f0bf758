// Programs that others start: environments as torchrun, srun and mpirun set them, and mpirun
// itself.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "runtime/descriptor.h"
#include "runtime/launch.h"

namespace tandem::runtime {
namespace {

using Variables = std::map<std::string, std::string>;

struct Report {
  std::string output;
  int num_failed = 0;
};

// Starts report_rank once for each environment, all at the same time.
Report start(const std::vector<Variables>& environments) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const Descriptor read_end(ends[0]);
  Descriptor write_end(ends[1]);
  std::vector<pid_t> children;
  for (const Variables& variables : environments) {
    std::vector<std::string> settings;
    for (const auto& [variable, value] : variables) settings.push_back(variable + "=" + value);
    std::vector<char*> pointers;
    for (auto& setting : settings) pointers.push_back(setting.data());
    pointers.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      char program[] = TANDEM_REPORT_RANK;
      char* arguments[] = {program, nullptr};
      dup2(write_end.get(), STDOUT_FILENO);
      execve(program, arguments, pointers.data());
      _exit(127);
    }
    children.push_back(child);
  }
  write_end.reset();
  Report report;
  char buffer[4096];
  for (ssize_t n = 0; (n = read(read_end.get(), buffer, sizeof buffer)) > 0;) {
    report.output.append(buffer, static_cast<std::size_t>(n));
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) ++report.num_failed;
  }
  return report;
}

void expect_all_ranks(const Report& report, int size) {
  EXPECT_EQ(report.num_failed, 0) << report.output;
  std::string heard;
  for (int rank = 0; rank < size; ++rank) heard += " " + std::to_string(rank);
  for (int rank = 0; rank < size; ++rank) {
    const std::string line =
        "rank " + std::to_string(rank) + " of " + std::to_string(size) + " hears" + heard + "\n";
    EXPECT_NE(report.output.find(line), std::string::npos) << line << " in:\n" << report.output;
  }
  EXPECT_EQ(std::count(report.output.begin(), report.output.end(), '\n'), size) << report.output;
}

TEST(StartedByOthers, TandemsOwnVariables) {
  std::vector<Variables> environments;
  const std::string name = unique_name();
  for (int rank = 0; rank < 3; ++rank) {
    environments.push_back(
        {{"TANDEM_RANK", std::to_string(rank)}, {"TANDEM_SIZE", "3"}, {"TANDEM_RENDEZVOUS", name}});
  }
  expect_all_ranks(start(environments), 3);
}

TEST(StartedByOthers, Torchrun) {
  std::vector<Variables> environments;
  for (int rank = 0; rank < 5; ++rank) {
    environments.push_back({{"RANK", std::to_string(rank)},
                            {"LOCAL_RANK", std::to_string(rank)},
                            {"WORLD_SIZE", "5"},
                            {"LOCAL_WORLD_SIZE", "5"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", std::to_string(getpid())},
                            {"TORCHELASTIC_RUN_ID", "none"}});
  }
  expect_all_ranks(start(environments), 5);
}

TEST(StartedByOthers, Srun) {
  std::vector<Variables> environments;
  for (int rank = 0; rank < 2; ++rank) {
    environments.push_back({{"SLURM_PROCID", std::to_string(rank)},
                            {"SLURM_NTASKS", "2"},
                            {"SLURM_STEP_NUM_NODES", "1"},
                            {"SLURM_JOB_ID", std::to_string(getpid())},
                            {"SLURM_STEP_ID", "0"}});
  }
  expect_all_ranks(start(environments), 2);
}

TEST(StartedByOthers, MpichWithoutAJobIdentifier) {
  std::vector<Variables> environments;
  for (int rank = 0; rank < 2; ++rank) {
    environments.push_back({{"PMI_RANK", std::to_string(rank)}, {"PMI_SIZE", "2"}});
  }
  expect_all_ranks(start(environments), 2);
}

TEST(StartedByOthers, TwoJobsAtOnceDoNotMix) {
  std::vector<Variables> environments;
  for (int job = 0; job < 2; ++job) {
    for (int rank = 0; rank < 2; ++rank) {
      environments.push_back({{"SLURM_PROCID", std::to_string(rank)},
                              {"SLURM_NTASKS", "2"},
                              {"SLURM_JOB_ID", "two-jobs-" + std::to_string(getpid())},
                              {"SLURM_STEP_ID", std::to_string(job)}});
    }
  }
  const Report report = start(environments);
  EXPECT_EQ(report.num_failed, 0) << report.output;
  EXPECT_EQ(std::count(report.output.begin(), report.output.end(), '\n'), 4) << report.output;
}

TEST(StartedByOthers, NobodysRankIsAnErrorThatNamesTheVariables) {
  const Report report = start({Variables{}});
  EXPECT_EQ(report.num_failed, 1);
  EXPECT_NE(report.output.find("TANDEM_RANK"), std::string::npos) << report.output;
  EXPECT_NE(report.output.find("OMPI_COMM_WORLD_RANK"), std::string::npos) << report.output;
}

#ifdef TANDEM_MPIRUN
TEST(StartedByOthers, Mpirun) {
  for (const int size : {1, 2, 5}) {
    const std::string command =
        "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 timeout 60 " TANDEM_MPIRUN
        " --oversubscribe -n " +
        std::to_string(size) + " " TANDEM_REPORT_RANK;
    Report report;
    FILE* const pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    char buffer[4096];
    for (std::size_t n = 0; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
      report.output.append(buffer, n);
    }
    report.num_failed = pclose(pipe) == 0 ? 0 : 1;
    expect_all_ranks(report, size);
  }
}
#endif

}  // namespace
}  // namespace tandem::runtime
