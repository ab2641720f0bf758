// Reads safetensors files (https://github.com/huggingface/safetensors), format of 2023: eight bytes
// of header length (little end first), a JSON header, and the tensors' bytes without gaps. The file
// is not trusted: every length and offset is checked before use, and a wrong one is an error that
// names tensor and value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace tandem::tools {

class SafetensorsError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct SafetensorsTensor {
  std::string dtype;  // as the file spells it: "BF16", "F32", "I64", ...
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // row-major, aligned to nothing
};

class Safetensors {
 public:
  // Throw SafetensorsError.
  static Safetensors read(const std::string& path);
  static Safetensors parse(std::vector<std::byte> file);

  [[nodiscard]] const std::map<std::string, SafetensorsTensor>& tensors() const { return tensors_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // Throws where the file has no such tensor.
  [[nodiscard]] const SafetensorsTensor& at(const std::string& name) const;

 private:
  std::vector<std::byte> file_;  // spans of tensors_ point into it; moving keeps them valid
  std::map<std::string, SafetensorsTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The tensor's elements, `T` being as wide as the dtype's. The caller has checked the dtype.
template <typename T>
std::vector<T> elements_of(const SafetensorsTensor& tensor) {
  std::vector<T> elements(tensor.bytes.size() / sizeof(T));
  if (!elements.empty()) {
    std::memcpy(elements.data(), tensor.bytes.data(), elements.size() * sizeof(T));
  }
  return elements;
}

}  // namespace tandem::tools
