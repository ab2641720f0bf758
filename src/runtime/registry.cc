// The backends of this build: one line each.
#include <array>
#include <string>

#include "backend/cpu/cpu_backend.h"
#include "runtime/backend.h"
#include "runtime/network.h"
#include "tandem/error.h"
#include "tandem/info.h"
#if defined(TANDEM_HAS_CUDA)
#include "backend/cuda/cuda_backend.h"
#endif
#if defined(TANDEM_HAS_NET)
#include "backend/net/net_backend.h"
#endif

namespace tandem {
namespace runtime {

std::span<const BackendInterface* const> registered_backends() {
  static const std::array all {
    &cpu::backend(),
#if defined(TANDEM_HAS_CUDA)
        &cuda::backend(),
#endif
  };
  return all;
}

const BackendInterface& backend(Backend which) {
  for (const BackendInterface* candidate : registered_backends()) {
    if (candidate->backend() == which) return *candidate;
  }
  throw Error(ErrorCode::kUnsupported,
              "backend " + std::string(name(which)) + " is not in this build of the library");
}

const NetworkInterface* network() {
#if defined(TANDEM_HAS_NET)
  return &net::network();
#else
  return nullptr;
#endif
}

}  // namespace runtime

std::string version() { return TANDEM_VERSION; }

NetworkInfo network_info() {
#if defined(TANDEM_HAS_NET)
  return net::network().info();
#else
  return {};
#endif
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> result;
  for (const Backend which : {Backend::kCpu, Backend::kCuda}) {
    result.push_back(
        {.backend = which, .why_not = "not in this build of the library", .details = {}});
    for (const runtime::BackendInterface* candidate : runtime::registered_backends()) {
      if (candidate->backend() == which) result.back() = candidate->info();
    }
  }
  return result;
}

}  // namespace tandem
