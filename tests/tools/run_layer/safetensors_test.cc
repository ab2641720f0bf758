// Good files are read; every way to lie about lengths, shapes and offsets is refused in words.
#include "run_layer/safetensors.h"

#include <gtest/gtest.h>

#include <string>

namespace tandem::tools {
namespace {

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::string length_of(std::uint64_t length) {
  std::string text;
  for (int i = 0; i < 8; ++i) text += static_cast<char>(length >> (8 * i) & 0xff);
  return text;
}

std::vector<std::byte> file_of(const std::string& header, const std::string& data) {
  return bytes_of(length_of(header.size()) + header + data);
}

void expect_refused(const std::vector<std::byte>& file, const std::string& because) {
  try {
    Safetensors::parse(file);
    ADD_FAILURE() << "accepted; expected: " << because;
  } catch (const SafetensorsError& error) {
    EXPECT_NE(std::string(error.what()).find(because), std::string::npos) << error.what();
  }
}

TEST(Safetensors, ReadsTensorsAndMetadata) {
  const Safetensors file =
      Safetensors::parse(file_of(R"({"__metadata__":{"source":"a test"},)"
                                 R"("b":{"dtype":"U8","shape":[3],"data_offsets":[4,7]},)"
                                 R"("a":{"dtype":"I16","shape":[1,2],"data_offsets":[0,4]}}   )",
                                 std::string("\1\0\2\0xyz", 7)));
  EXPECT_EQ(file.metadata().at("source"), "a test");
  ASSERT_EQ(file.tensors().size(), 2U);
  EXPECT_EQ(file.at("a").dtype, "I16");
  EXPECT_EQ(file.at("a").shape, (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(elements_of<std::int16_t>(file.at("a")), (std::vector<std::int16_t>{1, 2}));
  EXPECT_EQ(elements_of<char>(file.at("b")), (std::vector<char>{'x', 'y', 'z'}));
}

TEST(Safetensors, ReadsScalarsEmptyTensorsAndEmptyFiles) {
  const Safetensors file =
      Safetensors::parse(file_of(R"({"s":{"dtype":"U8","shape":[],"data_offsets":[0,1]},)"
                                 R"("e":{"dtype":"F32","shape":[0,7],"data_offsets":[1,1]}})",
                                 "x"));
  EXPECT_EQ(file.at("s").bytes.size(), 1U);
  EXPECT_TRUE(file.at("e").bytes.empty());
  EXPECT_TRUE(Safetensors::parse(file_of("{}", "")).tensors().empty());
}

TEST(Safetensors, StaysValidWhenMoved) {
  Safetensors file =
      Safetensors::parse(file_of(R"({"s":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"));
  const Safetensors moved = std::move(file);
  EXPECT_EQ(elements_of<char>(moved.at("s")), (std::vector<char>{'x'}));
}

TEST(Safetensors, NamesAMissingTensorAndAMissingFile) {
  EXPECT_THROW(static_cast<void>(Safetensors::parse(file_of("{}", "")).at("x")), SafetensorsError);
  EXPECT_THROW(Safetensors::read("/nonexistent.safetensors"), SafetensorsError);
  EXPECT_THROW(Safetensors::read("/proc"), SafetensorsError);  // a directory
}

TEST(Safetensors, RefusesWrongHeaderLengths) {
  expect_refused({}, "0 bytes, too few");
  expect_refused(bytes_of("1234567"), "7 bytes, too few");
  expect_refused(bytes_of(length_of(1) + ""), "a header of 1 bytes in a file of 8");
  expect_refused(bytes_of(length_of(~0ULL) + "{}"), "more than 100000000");
  expect_refused(bytes_of(length_of(1ULL << 63) + "{}"), "more than 100000000");
}

TEST(Safetensors, RefusesHeadersThatAreNoJsonObject) {
  expect_refused(file_of("", ""), "no JSON object");
  expect_refused(file_of("[]", ""), "no JSON object");
  expect_refused(file_of("{\"a\":", ""), "no JSON");
  expect_refused(file_of("{} {}", ""), "no JSON");
  expect_refused(file_of("{\"a\xff\":1}", ""), "no JSON");
  expect_refused(file_of("{\"a\":" + std::string(100'000, '[') + "}", ""), "no JSON");
}

TEST(Safetensors, RefusesEntriesThatAreNotTensors) {
  expect_refused(file_of(R"({"a":1})", ""), "no JSON object");
  expect_refused(file_of(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", "x"), "no dtype");
  expect_refused(file_of(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", "x"), "no shape");
  expect_refused(file_of(R"({"a":{"dtype":"U8","shape":[1]}})", "x"), "no data_offsets");
  expect_refused(file_of(R"({"a":{"dtype":1,"shape":[1],"data_offsets":[0,1]}})", "x"),
                 "dtype is no string");
  expect_refused(file_of(R"({"a":{"dtype":"Q9","shape":[1],"data_offsets":[0,1]}})", "x"),
                 "unknown dtype");
  expect_refused(file_of(R"({"__metadata__":{"a":1}})", ""), "no string");
  expect_refused(file_of(R"({"__metadata__":[]})", ""), "no JSON object");
}

TEST(Safetensors, RefusesShapesThatOverflowOrAreNoNumbers) {
  const auto with_shape = [](const std::string& shape) {
    return file_of(R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":[0,4]}})",
                   "abcd");
  };
  EXPECT_NO_THROW(Safetensors::parse(with_shape("[1]")));
  expect_refused(with_shape("[-1]"), "no unsigned integer");
  expect_refused(with_shape("[1.0]"), "no unsigned integer");
  expect_refused(with_shape("[\"1\"]"), "no unsigned integer");
  expect_refused(with_shape("[1e30]"), "no unsigned integer");
  expect_refused(with_shape("7"), "no array");
  expect_refused(with_shape("[9223372036854775808]"), "out of range");
  expect_refused(with_shape("[4294967296, 4294967296]"), "out of range");
  expect_refused(with_shape("[4611686018427387905]"), "out of range");  // 4 x wraps to 4
  expect_refused(with_shape("[2]"), "4 bytes where shape and dtype need 8");
}

TEST(Safetensors, RefusesOffsetsOutsideTheFile) {
  const auto with_offsets = [](const std::string& offsets) {
    return file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + offsets + "}}", "ab");
  };
  EXPECT_NO_THROW(Safetensors::parse(with_offsets("[0,2]")));
  expect_refused(with_offsets("[1,3]"), "bytes 1 to 3 of 2");
  expect_refused(with_offsets("[2,0]"), "bytes 2 to 0 of 2");
  expect_refused(with_offsets("[18446744073709551614,18446744073709551615]"), "out of range");
  expect_refused(with_offsets("[-2,0]"), "no unsigned integer");
  expect_refused(with_offsets("[0]"), "no pair");
  expect_refused(with_offsets("[0,1,2]"), "no pair");
  expect_refused(with_offsets("{}"), "no pair");
}

TEST(Safetensors, RefusesOverlapsGapsAndRepeatedNames) {
  const auto two = [](const std::string& first, const std::string& second,
                      const std::string& data) {
    return file_of(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":)" + first +
                       R"(},"b":{"dtype":"U8","shape":[2],"data_offsets":)" + second + "}}",
                   data);
  };
  EXPECT_NO_THROW(Safetensors::parse(two("[0,2]", "[2,4]", "abcd")));
  expect_refused(two("[0,2]", "[1,3]", "abc"), "overlaps");
  expect_refused(two("[0,2]", "[0,2]", "ab"), "overlaps");
  expect_refused(two("[0,2]", "[3,5]", "abcde"), "belong to no tensor");
  expect_refused(two("[0,2]", "[2,4]", "abcde"), "belong to no tensor");
  expect_refused(file_of(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                         R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                         "x"),
                 "named twice");
}

TEST(Safetensors, EveryTruncationAndEveryFlippedByteIsReadOrRefused) {
  const std::vector<std::byte> good =
      file_of(R"({"a":{"dtype":"I16","shape":[1,2],"data_offsets":[0,4]}})", "abcd");
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_THROW(Safetensors::parse({good.begin(), good.begin() + static_cast<long>(size)}),
                 SafetensorsError);
  }
  for (std::size_t position = 0; position < good.size(); ++position) {
    for (int bit = 0; bit < 8; ++bit) {
      std::vector<std::byte> damaged = good;
      damaged[position] ^= static_cast<std::byte>(1 << bit);
      try {
        const Safetensors file = Safetensors::parse(damaged);
        for (const auto& [name, tensor] : file.tensors()) EXPECT_EQ(tensor.bytes.size(), 4U);
      } catch (const SafetensorsError&) {  // the other right outcome
      }
    }
  }
}

}  // namespace
}  // namespace tandem::tools
