// SPDX-License-Identifier: Apache-2.0
// The part of the DLPack ABI that Fovea's C interface uses: https://dmlc.github.io/dlpack. A
// program that also uses another dlpack.h includes that one first; its declarations are then used.
#ifndef FOVEA_DLPACK_ABI_H_
#define FOVEA_DLPACK_ABI_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef DLPACK_DLPACK_H_

#ifdef __cplusplus
typedef enum : int32_t {
#else
typedef enum {
#endif
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,  // page-locked host memory
  kDLCUDAManaged = 13
} DLDeviceType;

typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;

typedef enum {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLOpaqueHandle = 3,
  kDLBfloat = 4,
  kDLComplex = 5,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e5m2 = 12
} DLDataTypeCode;

typedef struct {
  uint8_t code;    // a DLDataTypeCode
  uint8_t bits;    // size of one element
  uint16_t lanes;  // 1
} DLDataType;

// Element (i, j, ...) is at data + byte_offset + (i * strides[0] + j * strides[1] + ...) * bits
// / 8.
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;    // [ndim]
  int64_t* strides;  // [ndim] in elements; NULL: dense, the last dimension varies fastest
  uint64_t byte_offset;
} DLTensor;

#endif  // DLPACK_DLPACK_H_

// Versions of dlpack.h below 1.0 lack tensors that say whether they may be written.
#if !defined(DLPACK_DLPACK_H_) || !defined(DLPACK_MAJOR_VERSION)

typedef struct {
  uint32_t major;
  uint32_t minor;
} DLPackVersion;

typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void* manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned* self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;

#ifndef DLPACK_FLAG_BITMASK_READ_ONLY
#define DLPACK_FLAG_BITMASK_READ_ONLY (1UL << 0UL)
#endif

#endif

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_DLPACK_ABI_H_
