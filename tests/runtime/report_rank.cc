// A program for other launchers to start: finds its rank in the environment, meets the others,
// shares memory with them, and prints one line. Exit code 0 if all of that went well.
#include <cstdio>
#include <exception>
#include <string>

#include "runtime/bootstrap.h"
#include "runtime/symmetric_memory.h"
#include "tandem/communicator.h"

int main() {
  try {
    const auto communicator =
        tandem::Communicator::from_environment({.timeout = std::chrono::seconds(20)});
    tandem::runtime::SymmetricMemory memory(*communicator.bootstrap(), 4096);
    for (int peer = 0; peer < communicator.size(); ++peer) {
      memory.block(peer)[communicator.rank()] = static_cast<std::byte>(communicator.rank() + 1);
    }
    communicator.barrier();
    std::string seen;
    for (int peer = 0; peer < communicator.size(); ++peer) {
      seen += " " + std::to_string(static_cast<int>(memory.block(communicator.rank())[peer]) - 1);
    }
    std::printf("rank %d of %d hears%s\n", communicator.rank(), communicator.size(), seen.c_str());
    communicator.barrier();
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
  return 0;
}
