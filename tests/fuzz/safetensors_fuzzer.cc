// The safetensors reader: any file is refused with SafetensorsError or fully described by what it
// says of its tensors.
#include <cstring>
#include <string>

#include "fuzz/check.h"
#include "run_layer/safetensors.h"

namespace {

using tandem::fuzz::check;
using tandem::tools::Safetensors;
using tandem::tools::SafetensorsError;

constexpr std::size_t kLengthBytes = 8;

// Gives the text behind it a length, so that mutations reach what is behind the length.
std::size_t set_length(std::uint8_t* file, std::size_t size, std::size_t length) {
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    file[i] = static_cast<std::uint8_t>(static_cast<std::uint64_t>(length) >> (8 * i));
  }
  return size;
}

const std::string kValid =
    R"({"__metadata__":{"topk":"4"},"x":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},)"
    R"("y":{"dtype":"F32","shape":[],"data_offsets":[12,16]}})";

}  // namespace

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max);

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max, unsigned seed) {
  constexpr std::size_t kDataBytes = 16;
  if (size <= kLengthBytes && max >= kLengthBytes + kValid.size() + kDataBytes) {
    std::memcpy(data + kLengthBytes, kValid.data(), kValid.size());
    std::memset(data + kLengthBytes + kValid.size(), 7, kDataBytes);
    return set_length(data, kLengthBytes + kValid.size() + kDataBytes, kValid.size());
  }
  size = LLVMFuzzerMutate(data, size, max);
  if (size <= kLengthBytes || seed % 4 == 0) return size;
  // The header ends at the last brace, which leaves the tensors' bytes as many as they were.
  std::size_t end = size;
  while (end > kLengthBytes && data[end - 1] != '}') --end;
  return set_length(data, size, end - kLengthBytes);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  try {
    const Safetensors file = Safetensors::parse(std::vector<std::byte>(bytes, bytes + size));
    std::size_t total = 0;
    for (const auto& [name, tensor] : file.tensors()) {
      check(&file.at(name) == &tensor, "a tensor is found under its name");
      const auto elements = tandem::tools::elements_of<std::uint8_t>(tensor);
      check(elements.size() == tensor.bytes.size(), "all bytes of a tensor can be read");
      total += elements.size();
    }
    check(total + kLengthBytes <= size, "tensors do not share bytes");
  } catch (const SafetensorsError&) {
  }
  return 0;
}
