// What this build of the library can do on this machine.
#pragma once

#include <string>
#include <vector>

#include "tandem/types.h"

namespace tandem {

struct BackendInfo {
  Backend backend = Backend::kCpu;
  bool built = false;
  bool usable = false;
  std::string why_not;               // if not usable: the reason, in a sentence
  std::vector<std::string> details;  // devices, SIMD targets, ...
};

std::string version();  // "0.1.0"

// What ranks on several hosts use.
struct NetworkInfo {
  bool built = false;
  std::string library;  // "UCX 1.13.1": the version that this process has loaded
  // Processes can come and go: no bug of that version is known that ends others now and then.
  bool bears_turnover = false;
};
NetworkInfo network_info();

// One entry per backend that the library knows, built or not.
std::vector<BackendInfo> backends();

}  // namespace tandem
