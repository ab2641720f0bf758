// What a soak finds left behind.
#include "soak/holdings.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

namespace tandem::tools {
namespace {

constexpr std::size_t kLeak = std::size_t{8} << 20;

TEST(SoakHoldings, NothingIsLeftOfWhatCameAndWent) {
  const Holdings before = holdings();
  std::vector<char>(kLeak, 'x');
  close(open("/dev/null", O_RDONLY));
  EXPECT_EQ(what_is_left(before, holdings()), "");
}

TEST(SoakHoldings, LeftMemoryIsFoundBeItPrivateOrShared) {
  for (const int kind : {MAP_PRIVATE, MAP_SHARED}) {
    const Holdings before = holdings();
    void* const memory = mmap(nullptr, kLeak, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    std::memset(memory, 1, kLeak);
    EXPECT_NE(what_is_left(before, holdings()).find("bytes of memory"), std::string::npos) << kind;
    munmap(memory, kLeak);
    EXPECT_EQ(what_is_left(before, holdings()), "") << kind;
  }
}

TEST(SoakHoldings, DescriptorIsFound) {
  const Holdings before = holdings();
  const int descriptor = open("/dev/null", O_RDONLY);
  const Holdings after = holdings();
  EXPECT_NE(what_is_left(before, after).find("descriptors"), std::string::npos);
  close(descriptor);
  EXPECT_EQ(what_is_left(after, before), "");
}

TEST(SoakHoldings, TravelAsJson) {
  const Holdings held{.memory_bytes = 5, .descriptors = 7};
  const Holdings copy = nlohmann::json(held).get<Holdings>();
  EXPECT_EQ(copy.memory_bytes, 5);
  EXPECT_EQ(copy.descriptors, 7);
}

}  // namespace
}  // namespace tandem::tools
