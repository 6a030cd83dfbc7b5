// SPDX-License-Identifier: Apache-2.0
// Processors and streams.
#pragma once

#include <cstddef>
#include <string>

#include "fovea/api.h"

// The driver's stream object; declared here so that no CUDA header is needed.
struct CUstream_st;

namespace FOVEA_API fovea {

enum class DeviceKind { cpu, cuda };

// A processor: the CPU, or the GPU that the driver lists at `index`.
struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;

  bool operator==(const Device&) const = default;
};

std::string device_name(Device device);  // "cpu", "cuda:0"

// A CUDA stream, or null for the default stream. The CPU ignores it: every call has finished when
// it returns.
using Stream = CUstream_st*;

struct DeviceInfo {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  std::string name = {};    // the processor's own name
  int sm = 0;               // compute capability * 10 (90 for Hopper); 0 on the CPU
  std::string isa = {};     // widest instruction set for CPU kernels: amx, avx512, avx2 or ""
  int cores = 1;            // CPU threads or streaming multiprocessors
  size_t memory_bytes = 0;  // total

  Device device() const { return {kind, index}; }
};

// Returns the CPU that this process runs on.
DeviceInfo cpu_device();

}  // namespace fovea
