// The oracle's wire formats against bytes worked out by hand.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "reference/problem_builder.h"

namespace tandem::reference {
namespace {

using Floats = std::vector<float>;
using Codes = std::vector<std::uint8_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One token to one expert on one rank: the row is the token in its wire format.
RankOutput send(const std::vector<std::byte>& x, int hidden, DType x_dtype, Format format) {
  Problem problem{.num_ranks = 1,
                  .num_experts = 1,
                  .hidden = hidden,
                  .topk = 1,
                  .max_tokens = 1,
                  .x_dtype = x_dtype,
                  .format = format,
                  .layout = Layout::kPacked};
  problem.ranks = {{.num_tokens = 1, .x = x, .topk_idx = {0}, .topk_weights = {1}}};
  return dispatch(problem)[0];
}

RankOutput send(const Floats& x, Format format) {
  return send(bytes_of(x), static_cast<int>(x.size()), DType::kFloat32, format);
}

TEST(OracleFormats, PlainFormatsCarryEveryBit) {
  const std::vector<std::uint16_t> halves{0x0000, 0x8000, 0x0001, 0x7f81, 0xffff, 0x7c00, 0x1234};
  const std::vector<std::uint32_t> words{0x00000000, 0x80000000, 0x00000001, 0x7f800001,
                                         0xffffffff, 0x7f800000, 0x12345678};
  EXPECT_EQ(send(bytes_of(halves), 7, DType::kBFloat16, Format::kBFloat16).values,
            bytes_of(halves));
  EXPECT_EQ(send(bytes_of(halves), 7, DType::kFloat16, Format::kFloat16).values, bytes_of(halves));
  EXPECT_EQ(send(bytes_of(words), 7, DType::kFloat32, Format::kFloat32).values, bytes_of(words));
}

TEST(OracleFormats, PlainFormatsDequantiseToTheirValues) {
  const std::vector<bfloat16> x{to_bfloat16(1.5F), to_bfloat16(-3)};
  const RankOutput output = send(bytes_of(x), 2, DType::kBFloat16, Format::kBFloat16);
  EXPECT_EQ(dequantise(output, 2, Format::kBFloat16), (Floats{1.5F, -3}));
  const std::vector<float16> half{to_float16(0.25F), to_float16(-65504)};
  EXPECT_EQ(
      dequantise(send(bytes_of(half), 2, DType::kFloat16, Format::kFloat16), 2, Format::kFloat16),
      (Floats{0.25F, -65504}));
}

TEST(OracleFormats, Fp8WithScaleOne) {
  // 448 = 1.75 * 2^8; 1; -0.3 goes to 10 thirty-seconds = 1.25 * 2^-2; 2^-9 is the least; half of
  // it ties to zero, three halves of it to two.
  const RankOutput output = send({448, 1, -0.3F, 0x1p-9F, 0x1p-10F, -0x1.8p-9F}, Format::kFp8);
  EXPECT_EQ(values_of<std::uint8_t>(output.values), (Codes{0x7e, 0x38, 0xaa, 0x01, 0x00, 0x82}));
  EXPECT_EQ(values_of<float>(output.scales), (Floats{1}));
  EXPECT_EQ(dequantise(output, 6, Format::kFp8), (Floats{448, 1, -0.3125F, 0x1p-9F, 0, -0x1p-8F}));
}

TEST(OracleFormats, Fp8ScalesTheLargestMagnitudeTo448) {
  const RankOutput output = send({0.5F, -1}, Format::kFp8);  // 224 = 1.75 * 2^7
  EXPECT_EQ(values_of<std::uint8_t>(output.values), (Codes{0x76, 0xfe}));
  EXPECT_EQ(values_of<float>(output.scales), (Floats{1.0F / 448}));
}

TEST(OracleFormats, Fp8Pow2RoundsTheScaleUp) {
  // 1 / 448 lies between 2^-9 and 2^-8: values are multiplied by 256.
  const RankOutput output = send({0.5F, -1}, Format::kFp8Pow2);
  EXPECT_EQ(values_of<std::uint8_t>(output.values), (Codes{0x70, 0xf8}));
  EXPECT_EQ(values_of<float>(output.scales), (Floats{0x1p-8F}));
  EXPECT_EQ(dequantise(output, 2, Format::kFp8Pow2), (Floats{0.5F, -1}));
  // A scale that is a power of two already stays.
  EXPECT_EQ(values_of<float>(send({448}, Format::kFp8Pow2).scales), (Floats{1}));
  EXPECT_EQ(values_of<float>(send({448.00003F}, Format::kFp8Pow2).scales), (Floats{2}));
}

TEST(OracleFormats, Ue8m0IsTheBiasedExponent) {
  const RankOutput output = send({0.5F, -1}, Format::kFp8Ue8m0);
  EXPECT_EQ(values_of<std::uint8_t>(output.values), (Codes{0x70, 0xf8}));
  EXPECT_EQ(values_of<std::uint8_t>(output.scales), (Codes{127 - 8, 0, 0, 0}));
  EXPECT_EQ(dequantise(output, 2, Format::kFp8Ue8m0), (Floats{0.5F, -1}));
}

TEST(OracleFormats, Ue8m0PacksFourGroupsToAWord) {
  Floats x(4 * 128 + 1);  // five groups, the last of one channel
  for (int group = 0; group < 5; ++group) x[group * 128] = std::ldexp(448.0F, group);
  const RankOutput output = send(x, Format::kFp8Ue8m0);
  EXPECT_EQ(values_of<std::uint8_t>(output.scales), (Codes{127, 128, 129, 130, 131, 0, 0, 0}));
  EXPECT_EQ(values_of<std::uint32_t>(output.scales), (std::vector<std::uint32_t>{0x8281807f, 131}));
  EXPECT_EQ(dequantise(output, 513, Format::kFp8Ue8m0), x);
}

TEST(OracleFormats, GroupsOf128HaveScalesOfTheirOwn) {
  Floats x(130, 1);
  x[0] = 448;
  x[128] = -896;
  const RankOutput output = send(x, Format::kFp8);
  EXPECT_EQ(values_of<float>(output.scales), (Floats{1, 2}));
  const Codes codes = values_of<std::uint8_t>(output.values);
  EXPECT_EQ(codes[1], 0x38);    // 1
  EXPECT_EQ(codes[127], 0x38);  // the first group's last
  EXPECT_EQ(codes[128], 0xfe);  // -448
  EXPECT_EQ(codes[129], 0x30);  // 0.5
}

TEST(OracleFormats, ZeroGroupsDequantiseToZeros) {
  // The floor: 1e-4 / 448 = 2.23e-7, whose next power of two is 2^-22.
  for (const Format format : {Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0}) {
    const RankOutput output = send({0, -0.0F, 0}, format);
    EXPECT_EQ(values_of<std::uint8_t>(output.values), (Codes{0x00, 0x80, 0x00}));
    EXPECT_EQ(dequantise(output, 3, format), (Floats{0, 0, 0}));
  }
  EXPECT_EQ(values_of<float>(send({0}, Format::kFp8).scales), (Floats{1e-4F / 448}));
  EXPECT_EQ(values_of<float>(send({0}, Format::kFp8Pow2).scales), (Floats{0x1p-22F}));
  EXPECT_EQ(values_of<std::uint8_t>(send({0}, Format::kFp8Ue8m0).scales), (Codes{105, 0, 0, 0}));
}

TEST(OracleFormats, QuietGroupsShareTheFloorsScale) {
  // 5e-5 is half of the floor: 224.
  const RankOutput output = send({5e-5F}, Format::kFp8);
  EXPECT_EQ(values_of<std::uint8_t>(output.values), (Codes{0x76}));
  EXPECT_EQ(values_of<float>(output.scales), (Floats{1e-4F / 448}));
}

TEST(OracleFormats, NanAndInfinitySpoilTheirGroupAndNoOther) {
  for (const Format format : {Format::kFp8, Format::kFp8Pow2, Format::kFp8Ue8m0}) {
    for (const float special : {kNan, -kNan, kInfinity, -kInfinity}) {
      Floats x(3 * 128, 448);
      x[130] = special;
      x[140] = 0;
      const Floats back = dequantise(send(x, format), 3 * 128, format);
      for (int h = 0; h < 3 * 128; ++h) {
        if (h / 128 == 1) {
          EXPECT_TRUE(std::isnan(back[h])) << h;
        } else {
          EXPECT_EQ(back[h], 448) << h;
        }
      }
    }
  }
}

TEST(OracleFormats, NanScaleTravelsAsNan) {
  EXPECT_TRUE(std::isnan(values_of<float>(send({1, kNan}, Format::kFp8).scales)[0]));
  EXPECT_TRUE(std::isnan(values_of<float>(send({1, kNan}, Format::kFp8Pow2).scales)[0]));
  EXPECT_EQ(values_of<std::uint8_t>(send({1, kNan}, Format::kFp8Ue8m0).scales)[0], 255);
  EXPECT_EQ(values_of<std::uint8_t>(send({1, kInfinity}, Format::kFp8Ue8m0).scales)[0], 255);
  // NaN wins over a larger finite value and over infinity, wherever it stands.
  EXPECT_TRUE(std::isnan(values_of<float>(send({kInfinity, kNan, 1}, Format::kFp8).scales)[0]));
}

TEST(OracleFormats, Fp8TakesBfloat16AndFloat16) {
  const std::vector<bfloat16> brain{to_bfloat16(0.5F), to_bfloat16(-1)};
  const std::vector<float16> half{to_float16(0.5F), to_float16(-1)};
  for (const auto& output : {send(bytes_of(brain), 2, DType::kBFloat16, Format::kFp8),
                             send(bytes_of(half), 2, DType::kFloat16, Format::kFp8)}) {
    EXPECT_EQ(values_of<std::uint8_t>(output.values), (Codes{0x76, 0xfe}));
    EXPECT_EQ(values_of<float>(output.scales), (Floats{1.0F / 448}));
  }
}

TEST(OracleFormats, EveryCopyOfATokenIsTheSameRow) {
  Problem problem{.num_ranks = 1,
                  .num_experts = 2,
                  .hidden = 2,
                  .topk = 2,
                  .max_tokens = 2,
                  .x_dtype = DType::kFloat32,
                  .format = Format::kFp8,
                  .layout = Layout::kPadded};
  problem.ranks = {rank_input(2, {0.5F, -1, 448, 1}, {1, 0, 1, -1}, {1, 1, 1, 1})};
  const RankOutput output = dispatch(problem)[0];
  // Padding of two rows an expert; rows without a token are zero.
  EXPECT_EQ(values_of<std::uint8_t>(output.values),
            (Codes{0x76, 0xfe, 0, 0, 0x76, 0xfe, 0x7e, 0x38}));
  EXPECT_EQ(values_of<float>(output.scales), (Floats{1.0F / 448, 0, 1.0F / 448, 1}));
}

}  // namespace
}  // namespace tandem::reference
