#include "run_layer/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

namespace tandem::tools {

namespace {

using nlohmann::json;

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit

struct DTypeBytes {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr std::array kDTypes = {
    DTypeBytes{"BOOL", 1},    DTypeBytes{"U8", 1},  DTypeBytes{"I8", 1},  DTypeBytes{"F8_E5M2", 1},
    DTypeBytes{"F8_E4M3", 1}, DTypeBytes{"I16", 2}, DTypeBytes{"U16", 2}, DTypeBytes{"F16", 2},
    DTypeBytes{"BF16", 2},    DTypeBytes{"I32", 4}, DTypeBytes{"U32", 4}, DTypeBytes{"F32", 4},
    DTypeBytes{"F64", 8},     DTypeBytes{"I64", 8}, DTypeBytes{"U64", 8}};

// Names come from the file: quoted, so that odd bytes do not reach a terminal, and cut.
std::string quoted(const std::string& name) {
  constexpr std::size_t kMaxShown = 60;
  return json(name.substr(0, kMaxShown)).dump(-1, ' ', true, json::error_handler_t::replace);
}

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw SafetensorsError("not a valid safetensors file: " +
                         fmt::format(format, std::forward<Args>(args)...));
}

std::uint64_t read_length(const std::vector<std::byte>& file) {
  if (file.size() < kLengthBytes) {
    refuse("{} bytes, too few for the header's length", file.size());
  }
  std::uint64_t length = 0;
  for (std::uint64_t i = 0; i < kLengthBytes; ++i) {
    length |= std::to_integer<std::uint64_t>(file[i]) << (8 * i);
  }
  if (length > kMaxHeaderBytes) {
    refuse("a header of {} bytes, more than {}", length, kMaxHeaderBytes);
  }
  if (length > file.size() - kLengthBytes) {
    refuse("a header of {} bytes in a file of {}", length, file.size());
  }
  return length;
}

json parse_header(std::string_view text) {
  if (text.empty() || text.front() != '{') refuse("its header is no JSON object");
  std::set<std::string> names;
  const auto refuse_repeated = [&](int depth, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 &&
        !names.insert(parsed.get<std::string>()).second) {
      refuse("{} is named twice", quoted(parsed.get<std::string>()));
    }
    return true;
  };
  try {
    return json::parse(text, refuse_repeated);
  } catch (const json::exception& error) {
    refuse("its header is no JSON ({})", error.what());
  }
}

std::uint64_t unsigned_of(const json& value, const std::string& name, const char* what) {
  if (!value.is_number_unsigned()) refuse("{}: {} is no unsigned integer", quoted(name), what);
  const auto number = value.get<std::uint64_t>();
  if (number > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
    refuse("{}: {} of {} is out of range", quoted(name), what, number);
  }
  return number;
}

const json& member(const json& entry, const std::string& name, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end()) refuse("{} has no {}", quoted(name), key);
  return *found;
}

std::uint64_t size_of_dtype(const std::string& dtype, const std::string& name) {
  for (const DTypeBytes& known : kDTypes) {
    if (known.name == dtype) return known.bytes;
  }
  refuse("{} has the unknown dtype {}", quoted(name), quoted(dtype));
}

// The tensor that an entry of the header describes, within `data`.
SafetensorsTensor tensor_of(const json& entry, const std::string& name,
                            std::span<const std::byte> data) {
  if (!entry.is_object()) refuse("{} is no JSON object", quoted(name));
  SafetensorsTensor tensor;
  const json& dtype = member(entry, name, "dtype");
  if (!dtype.is_string()) refuse("{}: dtype is no string", quoted(name));
  tensor.dtype = dtype.get<std::string>();

  std::uint64_t bytes = size_of_dtype(tensor.dtype, name);
  const json& shape = member(entry, name, "shape");
  if (!shape.is_array()) refuse("{}: shape is no array", quoted(name));
  for (const json& dimension : shape) {
    const std::uint64_t extent = unsigned_of(dimension, name, "a dimension");
    if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      refuse("{}: the shape's product is out of range", quoted(name));
    }
    tensor.shape.push_back(static_cast<std::int64_t>(extent));
  }

  const json& offsets = member(entry, name, "data_offsets");
  if (!offsets.is_array() || offsets.size() != 2) {
    refuse("{}: data_offsets is no pair", quoted(name));
  }
  const std::uint64_t begin = unsigned_of(offsets[0], name, "an offset");
  const std::uint64_t end = unsigned_of(offsets[1], name, "an offset");
  if (begin > end || end > data.size()) {
    refuse("{}: bytes {} to {} of {}", quoted(name), begin, end, data.size());
  }
  if (end - begin != bytes) {
    refuse("{}: {} bytes where shape and dtype need {}", quoted(name), end - begin, bytes);
  }
  tensor.bytes = data.subspan(begin, end - begin);
  return tensor;
}

// Tensors must follow each other and fill the file: no byte is used twice, none is hidden.
void require_no_gaps(const std::map<std::string, SafetensorsTensor>& tensors,
                     std::span<const std::byte> data) {
  std::vector<std::pair<std::span<const std::byte>, std::string>> by_place;
  for (const auto& [name, tensor] : tensors) by_place.emplace_back(tensor.bytes, name);
  std::sort(by_place.begin(), by_place.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.data(), a.first.size()) < std::pair(b.first.data(), b.first.size());
  });
  std::size_t end = 0;
  for (const auto& [bytes, name] : by_place) {
    const auto begin = static_cast<std::size_t>(bytes.data() - data.data());
    if (begin < end) refuse("{} overlaps the tensor before it", quoted(name));
    if (begin > end) refuse("{} bytes before {} belong to no tensor", begin - end, quoted(name));
    end = begin + bytes.size();
  }
  if (end != data.size()) refuse("{} bytes at its end belong to no tensor", data.size() - end);
}

}  // namespace

Safetensors Safetensors::parse(std::vector<std::byte> file) {
  Safetensors parsed;
  parsed.file_ = std::move(file);
  const std::uint64_t length = read_length(parsed.file_);
  const std::span<const std::byte> data = std::span(parsed.file_).subspan(kLengthBytes + length);
  const json header =
      parse_header({reinterpret_cast<const char*>(parsed.file_.data()) + kLengthBytes, length});
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") {
      parsed.tensors_.emplace(name, tensor_of(entry, name, data));
      continue;
    }
    if (!entry.is_object()) refuse("__metadata__ is no JSON object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) refuse("__metadata__: {} is no string", quoted(key));
      parsed.metadata_.emplace(key, value.get<std::string>());
    }
  }
  require_no_gaps(parsed.tensors_, data);
  return parsed;
}

Safetensors Safetensors::read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary | std::ios::ate);
  if (!stream) throw SafetensorsError(fmt::format("cannot open '{}'", path));
  const std::streamoff size = stream.tellg();
  if (size < 0 || !stream.seekg(0)) throw SafetensorsError(fmt::format("cannot read '{}'", path));
  std::vector<std::byte> file(static_cast<std::size_t>(size));
  if (!stream.read(reinterpret_cast<char*>(file.data()), size)) {
    throw SafetensorsError(fmt::format("cannot read '{}'", path));
  }
  try {
    return parse(std::move(file));
  } catch (const SafetensorsError& error) {
    throw SafetensorsError(fmt::format("'{}': {}", path, error.what()));
  }
}

const SafetensorsTensor& Safetensors::at(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    throw SafetensorsError(fmt::format("the file has no tensor {}", quoted(name)));
  }
  return found->second;
}

}  // namespace tandem::tools
