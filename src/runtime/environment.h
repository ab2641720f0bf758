// What the environment of a process says about its rank. One immutable struct, and a pure function
// over whatever looks variables up, so that tests need no real environment.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace tandem::runtime {

struct Environment {
  int rank = 0;      // in [0, size)
  int size = 1;      // in [1, kMaxRanks]
  std::string name;  // of the rendezvous; the same on all ranks of one launch, on no others

  // Where ranks on several hosts meet, "host:port", and what lets them in; empty on one host.
  std::string address = {};
  std::string secret = {};
};

// The value of a variable; nullopt if it is not set. An empty value counts as not set.
using Lookup = std::function<std::optional<std::string>(const char* variable)>;

// In this order of preference; the first launcher whose rank and size are both set counts:
//
//   launcher  | rank                 | size                 | name from
//   itself    | TANDEM_RANK          | TANDEM_SIZE          | TANDEM_RENDEZVOUS
//   torchrun  | RANK                 | WORLD_SIZE           | MASTER_ADDR, MASTER_PORT,
//             |                      |                      | TORCHELASTIC_RUN_ID, and
//             |                      |                      | TORCHELASTIC_RESTART_COUNT if set
//   Open MPI  | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | PMIX_NAMESPACE, or
//             |                      |                      | OMPI_MCA_ess_base_jobid
//   MPICH     | PMI_RANK             | PMI_SIZE             | PMIX_NAMESPACE, PMI_JOBID, or the
//             |                      |                      | process that started the ranks
//   srun      | SLURM_PROCID         | SLURM_STEP_NUM_TASKS,| SLURM_JOB_ID, SLURM_STEP_ID (or
//             |                      | or SLURM_NTASKS      | SLURM_JOBID, SLURM_STEPID)
//
// TANDEM_RENDEZVOUS overrides the name in every case.
//
// Ranks meet at an address if TANDEM_ADDRESS is set, or if the launcher says that some of them are
// on other hosts (LOCAL_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS,
// SLURM_STEP_NUM_NODES). Without TANDEM_ADDRESS it is, under torchrun, MASTER_ADDR and the port
// after MASTER_PORT (which torchrun's own store uses); under srun the first host of
// SLURM_STEP_NODELIST (or SLURM_NODELIST) and a port made of the job's identifier. The secret is
// TANDEM_SECRET, which must be set then.
//
// Throws kInvalidArgument naming variables and values.
//
// `parent_process` is the id of the process that started this one.
Environment read_environment(const Lookup& lookup, long parent_process);

// The same over the real environment.
Environment read_process_environment();

}  // namespace tandem::runtime
