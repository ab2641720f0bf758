// A rank's door: where processes that are to become a rank of a running buffer, and ranks that let
// them in, fetch what they map. Each rank has one, under the buffer's door name and its number; who
// opens it holds the number, so that two processes cannot be one rank at a time.
//
// A visitor connects and is handed descriptors; nothing that it says is read. A thread serves
// the door; it sleeps while nobody comes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "runtime/descriptor.h"
#include "runtime/faults.h"
#include "runtime/situation.h"

namespace tandem::runtime {

class Network;

// What a rank hands out.
struct Offer {
  int num_ranks = 0;
  std::string options;  // those that must agree, as text
  // On one host.
  Descriptor block;
  Descriptor board;
  // Across hosts, where another kind of door gives them (network.h).
  std::shared_ptr<Network> network = {};
  Situation situation = {};
};

class Door {
 public:
  // Throws kOrder if the door is open already: another process is this rank.
  Door(const std::string& name, int rank, Seam seam = Seam());
  ~Door();
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // From now on visitors are served; until then they wait.
  void open(Offer offer);

 private:
  void serve();

  Descriptor listener_;
  Descriptor stop_;
  Offer offer_;
  Seam seam_;
  std::thread thread_;
};

// Fetches what a rank offers; nothing if its door is not there, or it does not answer soon: two
// seconds at most and half of `timeout`, the longest that others wait for the visitor.
std::optional<Offer> visit_door(const std::string& name, int rank,
                                std::chrono::nanoseconds timeout);

}  // namespace tandem::runtime
