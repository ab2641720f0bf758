// The binary interface of DLPack 1.1, as its specification fixes it: plain structs, so that arrays
// of any framework come in and go out without a header of theirs.
#pragma once

#include <cstdint>

namespace tandem::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kFloat8E4M3FN = 10,
};

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t num_dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: row-major without gaps
  std::uint64_t byte_offset;
};

// In a capsule named "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

// In a capsule named "dltensor_versioned".
struct VersionedTensor {
  std::uint32_t major;
  std::uint32_t minor;
  void* manager;
  void (*deleter)(VersionedTensor*);
  std::uint64_t flags;
  Tensor tensor;
};

inline constexpr std::uint32_t kMajor = 1;
inline constexpr std::uint32_t kMinor = 1;
inline constexpr std::uint64_t kReadOnly = 1;

inline constexpr char kName[] = "dltensor";
inline constexpr char kUsedName[] = "used_dltensor";
inline constexpr char kVersionedName[] = "dltensor_versioned";
inline constexpr char kUsedVersionedName[] = "used_dltensor_versioned";

}  // namespace tandem::python::dlpack
