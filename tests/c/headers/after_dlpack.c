// SPDX-License-Identifier: Apache-2.0
// Compiles the C interface after the DLPack header of another project, of a version below 1.0.
#include <stdint.h>

#define DLPACK_DLPACK_H_
#define DLPACK_VERSION 60

typedef enum { kDLCPU = 1, kDLCUDA = 2 } DLDeviceType;
typedef struct {
  DLDeviceType device_type;
  int device_id;
} DLDevice;
typedef enum { kDLInt = 0U, kDLUInt = 1U, kDLFloat = 2U, kDLBfloat = 4U } DLDataTypeCode;
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

#include "fovea/fovea.h"

_Static_assert(sizeof(fovea_tensor) == sizeof(DLTensor) + 8 * sizeof(int64_t), "one layout");
