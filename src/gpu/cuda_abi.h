// SPDX-License-Identifier: Apache-2.0
// The used part of the CUDA driver's binary interface, so that the build needs neither a toolkit
// nor its headers. Names and values follow the driver API documentation (CUDA 12 and later). Sizes
// are checked where the driver depends on them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fovea/device.h"

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

namespace fovea::gpu {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = CUctx_st*;
using CUmodule = CUmod_st*;
using CUfunction = CUfunc_st*;
using CUevent = CUevent_st*;
using CUgraph = CUgraph_st*;
using CUgraphNode = CUgraphNode_st*;
using CUgraphExec = CUgraphExec_st*;

inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaErrorOutOfMemory = 2;
inline constexpr CUresult kCudaErrorNotReady = 600;
inline constexpr CUresult kCudaErrorPeerAccessAlreadyEnabled = 704;

enum CUdevice_attribute : int {
  kAttributeMultiprocessorCount = 16,
  kAttributeComputeCapabilityMajor = 75,
  kAttributeComputeCapabilityMinor = 76,
};

enum CUfunction_attribute : int {
  kFunctionMaxDynamicSharedSizeBytes = 8,
  kFunctionNonPortableClusterSizeAllowed = 14,
};

enum CUstreamCaptureMode : int { kCaptureModeThreadLocal = 1 };
enum CUstreamCaptureStatus : int { kCaptureStatusNone = 0 };
enum CUevent_flags : unsigned { kEventDefault = 0 };
enum CUhost_flags : unsigned { kHostPortable = 1 };  // page-locked for all contexts
enum CUmemorytype : unsigned { kMemoryDevice = 2 };
enum CUstream_flags : unsigned { kStreamNonBlocking = 1 };

// Names device memory in other processes.
struct CUipcMemHandle {
  char bytes[64];
};

// A copy of a rectangle.
struct CUmemcpy2D {
  size_t from_x, from_y;  // bytes, rows
  CUmemorytype from_type;
  const void* from_host;
  CUdeviceptr from;
  void* from_array;
  size_t from_pitch;  // bytes between rows
  size_t to_x, to_y;
  CUmemorytype to_type;
  void* to_host;
  CUdeviceptr to;
  void* to_array;
  size_t to_pitch;
  size_t width, height;  // bytes, rows
};
static_assert(sizeof(CUmemcpy2D) == 128);

// Launch attributes form a tagged union of 64 bytes.
enum CUlaunchAttributeID : int {
  kLaunchAttributeClusterDimension = 4,
  kLaunchAttributeProgrammaticStreamSerialization = 6,
};
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  char pad[8 - sizeof(CUlaunchAttributeID)];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72);

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  Stream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

struct CUkernelNodeParams {
  CUfunction function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** arguments;
  void** extra;
  void* kernel;
  CUcontext context;
};
static_assert(sizeof(CUkernelNodeParams) == 72);

}  // namespace fovea::gpu
