// SPDX-License-Identifier: Apache-2.0
// Loads the CUDA driver's entry points at run time. Without a driver, the library works on the CPU
// and reports why the GPU is missing.
#pragma once

#include <string>
#include <string_view>

#include "gpu/cuda_abi.h"

namespace fovea::gpu {

// X(member, exported name, parameters). Exported names contain the version that has these
// parameters.
#define FOVEA_DRIVER_FUNCTIONS(X)                                                                  \
  X(init, "cuInit", (unsigned))                                                                    \
  X(error_name, "cuGetErrorName", (CUresult, const char**))                                        \
  X(error_string, "cuGetErrorString", (CUresult, const char**))                                    \
  X(device_count, "cuDeviceGetCount", (int*))                                                      \
  X(device_get, "cuDeviceGet", (CUdevice*, int))                                                   \
  X(device_name, "cuDeviceGetName", (char*, int, CUdevice))                                        \
  X(device_attribute, "cuDeviceGetAttribute", (int*, CUdevice_attribute, CUdevice))                \
  X(device_total_memory, "cuDeviceTotalMem_v2", (size_t*, CUdevice))                               \
  X(context_retain, "cuDevicePrimaryCtxRetain", (CUcontext*, CUdevice))                            \
  X(context_release, "cuDevicePrimaryCtxRelease_v2", (CUdevice))                                   \
  X(context_set, "cuCtxSetCurrent", (CUcontext))                                                   \
  X(can_access_peer, "cuDeviceCanAccessPeer", (int*, CUdevice, CUdevice))                          \
  X(enable_peer, "cuCtxEnablePeerAccess", (CUcontext, unsigned))                                   \
  X(memory_info, "cuMemGetInfo_v2", (size_t*, size_t*))                                            \
  X(memory_allocate, "cuMemAlloc_v2", (CUdeviceptr*, size_t))                                      \
  X(memory_free, "cuMemFree_v2", (CUdeviceptr))                                                    \
  X(memory_handle, "cuIpcGetMemHandle", (CUipcMemHandle*, CUdeviceptr))                            \
  X(memory_open, "cuIpcOpenMemHandle_v2", (CUdeviceptr*, CUipcMemHandle, unsigned))                \
  X(memory_close, "cuIpcCloseMemHandle", (CUdeviceptr))                                            \
  X(host_allocate, "cuMemHostAlloc", (void**, size_t, unsigned))                                   \
  X(host_free, "cuMemFreeHost", (void*))                                                           \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void*, size_t, Stream))            \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", (void*, CUdeviceptr, size_t, Stream))                    \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2", (CUdeviceptr, CUdeviceptr, size_t, Stream))            \
  X(copy_rectangle, "cuMemcpy2DAsync_v2", (const CUmemcpy2D*, Stream))                             \
  X(fill_bytes, "cuMemsetD8Async", (CUdeviceptr, unsigned char, size_t, Stream))                   \
  X(fill_words, "cuMemsetD32Async", (CUdeviceptr, unsigned, size_t, Stream))                       \
  X(stream_create, "cuStreamCreate", (Stream*, unsigned))                                          \
  X(stream_destroy, "cuStreamDestroy_v2", (Stream))                                                \
  X(stream_synchronize, "cuStreamSynchronize", (Stream))                                           \
  X(stream_begin_capture, "cuStreamBeginCapture_v2", (Stream, CUstreamCaptureMode))                \
  X(stream_end_capture, "cuStreamEndCapture", (Stream, CUgraph*))                                  \
  X(stream_is_capturing, "cuStreamIsCapturing", (Stream, CUstreamCaptureStatus*))                  \
  X(stream_capture_info, "cuStreamGetCaptureInfo_v3",                                              \
    (Stream, CUstreamCaptureStatus*, unsigned long long*, CUgraph*, const CUgraphNode**,           \
     const void**, size_t*))                                                                       \
  X(graph_exec_set_kernel, "cuGraphExecKernelNodeSetParams_v2",                                    \
    (CUgraphExec, CUgraphNode, const CUkernelNodeParams*))                                         \
  X(graph_instantiate, "cuGraphInstantiateWithFlags", (CUgraphExec*, CUgraph, unsigned long long)) \
  X(graph_launch, "cuGraphLaunch", (CUgraphExec, Stream))                                          \
  X(graph_exec_destroy, "cuGraphExecDestroy", (CUgraphExec))                                       \
  X(graph_destroy, "cuGraphDestroy", (CUgraph))                                                    \
  X(event_create, "cuEventCreate", (CUevent*, unsigned))                                           \
  X(event_record, "cuEventRecord", (CUevent, Stream))                                              \
  X(event_query, "cuEventQuery", (CUevent))                                                        \
  X(event_synchronize, "cuEventSynchronize", (CUevent))                                            \
  X(event_elapsed, "cuEventElapsedTime", (float*, CUevent, CUevent))                               \
  X(event_destroy, "cuEventDestroy_v2", (CUevent))                                                 \
  X(module_load, "cuModuleLoadData", (CUmodule*, const void*))                                     \
  X(module_unload, "cuModuleUnload", (CUmodule))                                                   \
  X(module_function, "cuModuleGetFunction", (CUfunction*, CUmodule, const char*))                  \
  X(module_global, "cuModuleGetGlobal_v2", (CUdeviceptr*, size_t*, CUmodule, const char*))         \
  X(tensor_map_encode, "cuTensorMapEncodeTiled",                                                   \
    (void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,               \
     const uint32_t*, int, int, int, int))                                                         \
  X(tensor_map_replace_address, "cuTensorMapReplaceAddress", (void*, void*))                       \
  X(function_set_attribute, "cuFuncSetAttribute", (CUfunction, CUfunction_attribute, int))         \
  X(max_active_clusters, "cuOccupancyMaxActiveClusters",                                           \
    (int*, CUfunction, const CUlaunchConfig*))                                                     \
  X(launch, "cuLaunchKernelEx", (const CUlaunchConfig*, CUfunction, void**, void**))

struct Driver {
#define FOVEA_DECLARE(member, name, parameters) CUresult(*member) parameters = nullptr;
  FOVEA_DRIVER_FUNCTIONS(FOVEA_DECLARE)
#undef FOVEA_DECLARE
};

// Returns an empty string if GPUs can be used, otherwise the reason: the driver library is missing
// or too old, or there is no device.
const std::string& why_no_driver();

// Throws Error{unsupported} with why_no_driver() if there is no driver.
const Driver& driver();

// Throws Error with the call, the driver's name for the error, and its text. The error code
// out_of_memory is preserved.
void check(CUresult result, std::string_view call);

}  // namespace fovea::gpu
