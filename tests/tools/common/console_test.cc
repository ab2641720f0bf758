#include "common/console.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>

namespace tandem::tools {
namespace {

TEST(Table, AlignsNumbersToTheRightAndWordsToTheLeft) {
  Table table({"format", "us"});
  table.add({"bf16", "1.5"});
  table.add({"fp8-ue8m0", "120.0"});
  EXPECT_EQ(table.text(),
            "format        us\n"
            "bf16         1.5\n"
            "fp8-ue8m0  120.0\n");
}

TEST(Table, WithoutRowsIsItsHeader) { EXPECT_EQ(Table({"a", "b"}).text(), "a  b\n"); }

TEST(Colour, IsForTerminalsOnly) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::tmpfile(), std::fclose);
  ASSERT_NE(file, nullptr);
  EXPECT_FALSE(use_colour(file.get()));
  EXPECT_EQ(green("ok", file.get()), "ok");
}

}  // namespace
}  // namespace tandem::tools
