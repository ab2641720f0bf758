// What happens to the ranks of a soak, from outside the library: processes are killed or stopped
// for a while, threads leave or come late. Rank 0 is spared and carries this out.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "soak/draw.h"
#include "soak/ledger.h"

namespace tandem::tools {

class Menace {
 public:
  Menace(const SessionPlan& plan, Ledger& ledger);
  ~Menace();  // whoever is stopped goes on
  Menace(const Menace&) = delete;
  Menace& operator=(const Menace&) = delete;

 private:
  void act();
  // False if this object goes meanwhile.
  bool pause(std::chrono::milliseconds duration);
  void end(int rank, pid_t process);
  void hold(int rank, pid_t process);
  [[nodiscard]] int num_alive() const;
  [[nodiscard]] int num_spared() const;

  const SessionPlan& plan_;
  Ledger& ledger_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace tandem::tools
