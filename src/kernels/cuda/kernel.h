// SPDX-License-Identifier: Apache-2.0
// A variant that is loaded onto the current GPU.
#pragma once

#include <cstdint>

#include "gpu/gpu.h"
#include "gpu/kernel_pack.h"
#include "gpu/launch.h"
#include "kernels/cuda/kernel_traits.h"

namespace fovea::kernels::cuda {

struct GridSize {
  uint32_t x = 1, y = 1;
};

struct LaunchOptions {
  // The kernel waits for the preceding one in the stream itself (griddepcontrol), so that it can be
  // set up while that one still runs. No effect before sm_90.
  bool overlapped = false;
  uint32_t cluster = 1;  // blocks of a cluster of neighbours; divides the grid's x
};
inline constexpr LaunchOptions kOverlapped = {.overlapped = true};

// Loaded once, when a backend is built. Launches need the context of that time to be current.
class Kernel {
 public:
  Kernel() = default;
  // Throws Error{unsupported} if the store has no machine code and cannot compile it, and
  // Error{device_failure} if the code does not load.
  Kernel(const gpu::KernelVariant& variant, gpu::KernelStore& store);

  // Enqueues one launch with what the kernel takes by value. Grids of zero blocks do nothing.
  void launch(GridSize grid, gpu::ParamBlock params, gpu::Launcher launcher,
              LaunchOptions options = {}) const;

  // Allows clusters of more than eight blocks, which not every GPU of the architecture can run.
  void allow_large_clusters() const;

  // Returns how many clusters of `cluster` blocks run at the same time on the current GPU; 0: none
  // can. For sm_90 and later.
  int active_clusters(uint32_t cluster) const;

  // Throw Error{corrupt_file} if the kernel's traits have no such tile.
  int row_tile() const { return tile_of(traits_.row_tile); }
  int key_tile() const { return tile_of(traits_.key_tile); }

 private:
  static int tile_of(int32_t tile) {
    if (tile > 0) return tile;
    fail(ErrorCode::corrupt_file, "a kernel that works by tiles says that its tiles have {} rows",
         tile);
  }

  gpu::Owned<CUmod_st> module_;
  gpu::CUfunction function_ = nullptr;  // in the module
  Traits traits_{};
  bool overlaps_ = false;  // the architecture has griddepcontrol
};

}  // namespace fovea::kernels::cuda
