// SPDX-License-Identifier: Apache-2.0
// The memory block that a backend carves all its buffers from.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>
#include <string_view>

#include "core/workspace_carver.h"
#include "fovea/device.h"
#include "gpu/gpu.h"

namespace fovea {

// An aligned workspace that a backend allocates for itself.
class WorkspaceMemory {
 public:
  WorkspaceMemory() = default;
  ~WorkspaceMemory();
  WorkspaceMemory(WorkspaceMemory&&) noexcept = default;
  WorkspaceMemory& operator=(WorkspaceMemory&&) noexcept = default;

  // Returns the workspace of a reserve(): `given`, after check_workspace(), or own memory if
  // `given` is empty. Throws Error{out_of_memory} naming the bytes.
  std::span<std::byte> given_or_own(std::span<std::byte> given, size_t needed, Device device,
                                    std::string_view backend);

 private:
  struct AlignedDelete {
    void operator()(std::byte* memory) const {
      ::operator delete (memory, std::align_val_t{kWorkspaceAlignment});
    }
  };

  WorkspaceMemory(Device device, size_t bytes);

  std::unique_ptr<std::byte, AlignedDelete> cpu_;
  std::unique_ptr<gpu::Context> context_;
  gpu::DeviceBuffer gpu_;
  std::span<std::byte> bytes_;  // the memory of whichever is used
};

// Throws Error{workspace_too_small} naming `needed`, or Error{invalid_argument} naming an address
// that is null or misaligned.
void check_workspace(std::span<std::byte> workspace, size_t needed, std::string_view backend);

}  // namespace fovea
