// SPDX-License-Identifier: Apache-2.0
// The parts of DLPack 1.3 that the module reads and writes. Layouts and numbers are those of the
// standard (https://dmlc.github.io/dlpack/latest/c_api.html).
#pragma once

#include <cstdint>

namespace fovea::python {

enum DlDeviceKind : int32_t { kDlCpu = 1, kDlCuda = 2, kDlCudaHost = 3, kDlCudaManaged = 13 };

struct DlDevice {
  int32_t kind;
  int32_t index;
};

enum DlTypeCode : uint8_t {
  kDlInt = 0,
  kDlUint = 1,
  kDlFloat = 2,
  kDlBfloat = 4,
  kDlBool = 6,
  kDlFloat8E4m3fn = 10,
  kDlFloat8E5m2 = 12,
};

struct DlType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;

  bool operator==(const DlType&) const = default;
};

struct DlTensor {
  void* data;
  DlDevice device;
  int32_t dimensions;
  DlType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: dense
  uint64_t byte_offset;
};

// Capsules named "dltensor" hold this.
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor*);
};

struct DlVersion {
  uint32_t major;
  uint32_t minor;
};

constexpr uint64_t kDlReadOnly = 1;

// Capsules named "dltensor_versioned" hold this.
struct DlManagedTensorVersioned {
  DlVersion version;
  void* context;
  void (*deleter)(DlManagedTensorVersioned*);
  uint64_t flags;
  DlTensor tensor;
};

struct DlExchangeHeader {
  DlVersion version;
  DlExchangeHeader* previous;
};

// The capsule `__dlpack_c_exchange_api__` of a type points to this. Functions that the module does
// not call have no signature here.
struct DlExchangeApi {
  DlExchangeHeader header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  // Fills a view that lives as long as the object; null: the library has no such function.
  int (*view_of_object)(void* object, DlTensor* view);
  int (*current_stream)(int32_t device_kind, int32_t device_index, void** stream);
};

}  // namespace fovea::python
