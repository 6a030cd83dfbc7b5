// SPDX-License-Identifier: Apache-2.0
// Communicators between GPUs over NVIDIA's NCCL, which is found at run time: FOVEA_NCCL, or
// libnccl.so.2 of the loader's path. NVLink multicast stays off (NCCL_NVLS_ENABLE=0).
#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>

#include "fovea/api.h"
#include "fovea/communicator.h"
#include "fovea/device.h"

namespace FOVEA_API fovea {

// Made by one rank, which sends it to all others by any means.
struct NcclId {
  std::array<char, 128> bytes = {};
};

struct NcclOptions {
  std::string path = {};           // path of another NCCL
  void* barrier_memory = nullptr;  // 4 bytes of device memory; null: allocated on the device
  // Time that a rank waits for all others to join. NCCL before 2.14 waits without a limit.
  std::chrono::milliseconds timeout{120'000};
};

// Throws Error{unsupported} with the reason if there is no usable NCCL (2.7 or later), and
// Error{device_failure} naming the call that failed.
NcclId make_nccl_id(const NcclOptions& options = {});

// Joins a group of `size` ranks, each on a GPU of its own; returns when all have joined. Calls are
// enqueued on the stream that they get, also in a capture. check() asks NCCL for errors of enqueued
// calls; abort() ends them on this rank. Errors as above, Error{device_failure} if a rank does not
// come within the timeout, and Error{invalid_argument} for a rank, device or timeout out of range.
std::unique_ptr<Communicator> make_nccl_communicator(const NcclId& id, int rank, int size,
                                                     Device device,
                                                     const NcclOptions& options = {});
// Uses a caller's ncclComm_t, a blocking one, which must outlive the communicator and is not
// destroyed with it.
std::unique_ptr<Communicator> wrap_nccl_communicator(void* comm, Device device,
                                                     const NcclOptions& options = {});

}  // namespace fovea
