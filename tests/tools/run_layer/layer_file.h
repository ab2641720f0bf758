// Writes small layers as safetensors files, right or wrong ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tandem::tools {

class LayerFile {
 public:
  template <typename T>
  LayerFile& add(const std::string& name, const std::string& dtype,
                 const std::vector<std::int64_t>& shape, const std::vector<T>& values) {
    const std::size_t begin = data_.size();
    data_.resize(begin + values.size() * sizeof(T));
    if (!values.empty()) {
      std::memcpy(data_.data() + begin, values.data(), values.size() * sizeof(T));
    }
    header_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, data_.size()}}};
    return *this;
  }

  [[nodiscard]] std::vector<std::byte> bytes() const {
    const std::string header = header_.dump();
    std::vector<std::byte> file(8 + header.size());
    const std::uint64_t length = header.size();
    std::memcpy(file.data(), &length, 8);
    std::memcpy(file.data() + 8, header.data(), header.size());
    file.insert(file.end(), data_.begin(), data_.end());
    return file;
  }

 private:
  nlohmann::json header_ = nlohmann::json::object();
  std::vector<std::byte> data_;
};

}  // namespace tandem::tools
