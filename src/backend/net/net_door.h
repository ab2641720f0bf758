// A rank's door for processes of other hosts that are to become a rank of its buffer: it listens at
// an address, and tells whoever knows the secret what such a process needs (invitation.h). The
// process then turns to all ranks itself (Connections::say_hello).
//
// Plain sockets, whose frames are read as warily as those of other processes on this host: anybody
// may come by. (UCX's own listener of 1.13 is for those who are expected: it ends the process if it
// is closed while somebody is about to connect.)
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "runtime/descriptor.h"
#include "runtime/socket_channel.h"

namespace tandem::net {

class NetDoor {
 public:
  // An encoded Invitation for a process that says it is to be `rank`, which may be any number.
  // Called by the door's thread. Throws Error, which is told to the visitor: kTimeout means "not
  // yet".
  using Invite = std::function<std::vector<std::byte>(int rank)>;

  // Throws kInvalidArgument, kResource. `who` says whose door it is.
  NetDoor(const std::string& address, const std::string& secret, const std::string& who,
          Invite invite);
  ~NetDoor();
  NetDoor(const NetDoor&) = delete;
  NetDoor& operator=(const NetDoor&) = delete;

 private:
  struct Visit {
    runtime::Channel channel;
    runtime::Deadline deadline;
  };

  void serve();
  // Is the visit over?
  [[nodiscard]] bool look(Visit& visit) const;
  [[nodiscard]] std::vector<std::byte> answer(const runtime::Frame& question) const;

  std::string secret_;
  std::string who_;
  Invite invite_;
  runtime::Descriptor listener_;
  runtime::Descriptor stop_;  // an eventfd
  std::vector<Visit> visits_;
  std::thread thread_;
};

// Asks at the door at `address`, again and again until it is opened and it is time. Throws kTimeout
// with the reason if that is not so in time, and what the door refuses with: kInvalidArgument
// (another secret), kOrder (another process is that rank), kMismatch.
std::vector<std::byte> visit_net_door(const std::string& address, const std::string& secret,
                                      int rank, std::chrono::milliseconds timeout);

}  // namespace tandem::net
