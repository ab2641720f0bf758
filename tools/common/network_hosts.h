// Several hosts on one machine: network namespaces, joined by veth pairs and a bridge, that
// processes move into. They have no names, so nothing is left behind, however a process that uses
// them ends.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tandem::tools {

class NetworkHosts {
 public:
  // Throws std::runtime_error saying what this process lacks: rights, or the `ip` command.
  explicit NetworkHosts(int num_hosts);
  ~NetworkHosts();
  NetworkHosts(const NetworkHosts&) = delete;
  NetworkHosts& operator=(const NetworkHosts&) = delete;

  [[nodiscard]] int size() const { return static_cast<int>(hosts_.size()); }
  // "10.99.0.1" for host 0.
  [[nodiscard]] static std::string address(int host);

  // Moves the calling thread, and the threads and processes it starts, to a host.
  void enter(int host) const;

  // Takes a host's link down, or up again.
  void set_link(int host, bool up) const;

  // Runs a command on a host, or, for kSwitch, on the switch between them, where the link to host h
  // is called "port<h>". Returns what it printed; throws with that if it fails.
  static constexpr int kSwitch = -1;
  std::string run(int host, const std::vector<std::string>& command,
                  std::string_view input = {}) const;

  // A bridge forwards to a port once the kernel has taken note of its link, and that it does about
  // once a second: packets sent before are lost. Waits until it does to that many on the switch.
  void await_forwarding(int num_ports) const;

 private:
  [[nodiscard]] int descriptor(int host) const { return host == kSwitch ? switch_ : hosts_[host]; }

  int switch_ = -1;
  std::vector<int> hosts_;
};

}  // namespace tandem::tools
