#include "support/compare.h"

#include <cmath>
#include <cstring>
#include <iomanip>
#include <sstream>

#include "layout/row.h"
#include "support/world.h"

namespace tandem::test {
namespace {

std::uint32_t bits_of(const std::byte* bytes, std::int64_t index, int size) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, bytes + index * size, size);
  return bits;
}

float float_of(std::uint32_t bits, DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return to_float(bfloat16{static_cast<std::uint16_t>(bits)});
    case DType::kFloat16:
      return to_float(float16{static_cast<std::uint16_t>(bits)});
    case DType::kFloat8E4M3:
      return to_float(float8_e4m3{static_cast<std::uint8_t>(bits)});
    default:
      return std::bit_cast<float>(bits);
  }
}

std::string shape_text(ConstTensorView view) {
  std::ostringstream text;
  text << name(view.dtype) << " [";
  for (int dim = 0; dim < view.num_dims; ++dim) text << (dim == 0 ? "" : ", ") << view.shape[dim];
  text << "]";
  return text.str();
}

// Does the view have this dtype and shape? "" if so.
std::string check_shape(const char* what, ConstTensorView view, DType dtype,
                        std::initializer_list<std::int64_t> shape) {
  const ConstTensorView wanted(nullptr, dtype, shape);
  if (view.dtype == dtype && view.num_dims == wanted.num_dims && view.shape == wanted.shape) {
    return "";
  }
  return std::string(what) + " is " + shape_text(view) + ", expected " + shape_text(wanted) + "\n";
}

template <typename T>
std::string compare_list(const char* what, const std::vector<T>& actual,
                         const std::vector<T>& expected) {
  for (std::size_t index = 0; index < expected.size(); ++index) {
    if (index < actual.size() && actual[index] == expected[index]) continue;
    std::ostringstream text;
    text << what << "[" << index << "]: got ";
    if (index < actual.size()) {
      text << actual[index];
    } else {
      text << "nothing";
    }
    text << ", expected " << expected[index] << "\n";
    return text.str();
  }
  return "";
}

// Where a row of the result comes from.
std::string describe_row(const reference::RankOutput& expected, std::int64_t row) {
  std::size_t local = 0;
  while (local + 1 < expected.experts.size() && expected.offsets[local + 1] <= row) ++local;
  std::ostringstream text;
  text << "row " << row << " (expert " << expected.experts[local] << ", local " << local
       << ", source rank " << expected.source_ranks[row] << ", token "
       << expected.source_tokens[row] << ")";
  return text.str();
}

std::string compare_rows(const char* what, const reference::RankOutput& expected,
                         const std::vector<std::byte>& actual_rows,
                         const std::vector<std::byte>& expected_rows, std::int64_t width,
                         DType dtype, bool any_nan) {
  const std::int64_t row_bytes = width * size_of(dtype);
  for (std::int64_t row = 0; row < expected.num_rows; ++row) {
    if (expected.source_tokens[row] < 0) continue;
    const std::byte* actual = actual_rows.data() + row * row_bytes;
    const std::byte* wanted = expected_rows.data() + row * row_bytes;
    const std::int64_t channel = first_difference(actual, wanted, width, dtype, any_nan);
    if (channel < 0) continue;
    return std::string(what) + ", " + describe_row(expected, row) + ", channel " +
           std::to_string(channel) + ": got " + describe(actual, channel, dtype) + ", expected " +
           describe(wanted, channel, dtype) + "\n";
  }
  return "";
}

std::string compare_sources(const reference::RankOutput& expected,
                            const std::vector<std::int32_t>& sources) {
  for (std::int64_t row = 0; row < expected.num_rows; ++row) {
    if (expected.source_tokens[row] < 0 || sources[row] == expected.source_tokens[row]) continue;
    return "source_tokens, " + describe_row(expected, row) + ": got " +
           std::to_string(sources[row]) + "\n";
  }
  return "";
}

// The rows that the oracle speaks of: all of the padded layout, in the packed layout the first
// ones.
ConstTensorView first_rows(ConstTensorView view, std::int64_t num_rows) {
  if (view.num_dims < 3) view.shape[0] = num_rows;
  return view;
}

// Shapes of everything; values are compared only where these are right.
std::string check_shapes(const Scenario& scenario, int rank, const DispatchResult& result) {
  const Shape& shape = scenario.shape;
  const layout::RowShape row{shape.hidden, shape.format};
  const std::int64_t local = std::ssize(scenario.received[rank].experts);
  const std::int64_t width = row.num_scales();
  const DType scale_dtype = shape.format == Format::kFp8Ue8m0 ? DType::kInt32 : DType::kFloat32;
  std::string report;
  std::int64_t rows = local * shape.num_ranks * shape.max_tokens;
  if (shape.layout == Layout::kPadded) {
    const std::int64_t each = std::int64_t{shape.num_ranks} * shape.max_tokens;
    report += check_shape("x", result.x, value_dtype(shape.format), {local, each, shape.hidden});
    if (width > 0)
      report += check_shape("scales", result.scales, scale_dtype, {local, each, width});
  } else {
    rows = result.x.shape[0];
    report += check_shape("x", result.x, value_dtype(shape.format), {rows, shape.hidden});
    if (width > 0) report += check_shape("scales", result.scales, scale_dtype, {rows, width});
    if (rows < scenario.received[rank].num_rows) report += "x has too few rows\n";
  }
  if (width == 0 && result.scales.has_value()) report += "scales given without fp8\n";
  report += check_shape("counts", result.counts, DType::kInt32, {local});
  report += check_shape("offsets", result.offsets, DType::kInt64, {local + 1});
  report += check_shape("ranges", result.ranges, DType::kInt64, {local, shape.num_ranks});
  report += check_shape("source_tokens", result.source_tokens, DType::kInt32, {rows});
  return report;
}

}  // namespace

std::vector<std::byte> download(ConstTensorView view, void* stream) {
  std::vector<std::byte> bytes(view.num_elements() * size_of(view.dtype));
  if (bytes.empty()) return bytes;
  copy(TensorView(bytes.data(), view), view, backend_under_test(), stream);
  return bytes;
}

void upload(TensorView view, const std::byte* bytes, void* stream) {
  if (view.num_elements() == 0) return;
  copy(view, ConstTensorView(bytes, view), backend_under_test(), stream);
}

std::int64_t first_difference(const std::byte* actual, const std::byte* expected,
                              std::int64_t count, DType dtype, bool any_nan) {
  const int size = size_of(dtype);
  if (count == 0 || std::memcmp(actual, expected, count * size) == 0) return -1;
  for (std::int64_t index = 0; index < count; ++index) {
    const std::uint32_t seen = bits_of(actual, index, size);
    const std::uint32_t wanted = bits_of(expected, index, size);
    if (seen == wanted) continue;
    const bool both_nan = std::isnan(float_of(seen, dtype)) && std::isnan(float_of(wanted, dtype));
    if (!any_nan || !both_nan) return index;
  }
  return -1;
}

std::string describe(const std::byte* bytes, std::int64_t index, DType dtype) {
  std::ostringstream text;
  const std::uint32_t bits = bits_of(bytes, index, size_of(dtype));
  if (dtype != DType::kInt32) text << float_of(bits, dtype) << " ";
  text << "(0x" << std::hex << std::setfill('0') << std::setw(2 * size_of(dtype)) << bits << ")";
  return text.str();
}

std::string compare_received(const Scenario& scenario, int rank, const DispatchResult& result,
                             void* stream) {
  const Shape& shape = scenario.shape;
  const reference::RankOutput& expected = scenario.received[rank];
  std::string report = check_shapes(scenario, rank, result);
  if (!report.empty()) return report;
  report +=
      compare_list("counts", download_as<std::int32_t>(result.counts, stream), expected.counts);
  report +=
      compare_list("offsets", download_as<std::int64_t>(result.offsets, stream), expected.offsets);
  report +=
      compare_list("ranges", download_as<std::int64_t>(result.ranges, stream), expected.ranges);
  if (!report.empty() || expected.num_rows == 0) return report;
  report += compare_sources(
      expected,
      download_as<std::int32_t>(first_rows(result.source_tokens, expected.num_rows), stream));
  // As they are, formats carry bits; only fp8 computes, and there NaNs are alike.
  const bool fp8 = is_fp8(shape.format);
  report += compare_rows("x", expected, download(first_rows(result.x, expected.num_rows), stream),
                         expected.values, shape.hidden, value_dtype(shape.format), fp8);
  if (fp8) {
    const bool bytes = shape.format == Format::kFp8Ue8m0;
    report += compare_rows(
        "scales", expected, download(first_rows(result.scales, expected.num_rows), stream),
        expected.scales, layout::RowShape{shape.hidden, shape.format}.num_scales(),
        bytes ? DType::kInt32 : DType::kFloat32, !bytes);
  }
  return report;
}

std::string compare_combined(const Scenario& scenario, int rank, ConstTensorView out,
                             void* stream) {
  const std::vector<std::byte> actual = download(out, stream);
  const std::vector<std::byte>& expected = scenario.out[rank];
  if (actual.size() != expected.size()) return "out has the wrong size\n";
  const DType dtype = scenario.shape.combine_dtype;
  const std::int64_t count = std::ssize(expected) / size_of(dtype);
  const std::int64_t index = first_difference(actual.data(), expected.data(), count, dtype, true);
  if (index < 0) return "";
  std::ostringstream text;
  text << "out, token " << index / scenario.shape.hidden << ", channel "
       << index % scenario.shape.hidden << ": got " << describe(actual.data(), index, dtype)
       << ", expected " << describe(expected.data(), index, dtype) << "\n";
  return text.str();
}

}  // namespace tandem::test
