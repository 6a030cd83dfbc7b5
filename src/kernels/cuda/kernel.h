// SPDX-License-Identifier: Apache-2.0
// A variant loaded onto the current GPU, ready to launch.
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

// Looked up once, when a backend is built. Needs the context it was loaded in to be current.
class Kernel {
 public:
  Kernel() = default;
  // Error{unsupported} when the machine code cannot be had (see KernelStore), {device_failure} when
  // it does not load.
  Kernel(const gpu::KernelVariant& variant, gpu::KernelStore& store);

  // Enqueues one launch. Params is what the kernel takes by value; grids of zero blocks do nothing.
  // Neighbouring blocks form clusters of `cluster`, which divides grid.x.
  template <typename Params>
  void launch(GridSize grid, const Params& params, Stream stream, uint32_t cluster = 1) const {
    launch_with(grid, &params, sizeof(params), stream, false, cluster);
  }

  // As launch(), of a kernel that waits for the one before it in the stream itself
  // (griddepcontrol): it is set up while that one still runs; before sm_90 not.
  template <typename Params>
  void launch_overlapped(GridSize grid, const Params& params, Stream stream,
                         uint32_t cluster = 1) const {
    launch_with(grid, &params, sizeof(params), stream, true, cluster);
  }

  // Lets clusters of more than eight blocks be launched, which not every GPU of the architecture
  // has to run.
  void allow_large_clusters() const;

  // How many clusters of so many blocks run at the same time on the current GPU, 0 where they do
  // not run at all. sm_90 and later.
  int active_clusters(uint32_t cluster) const;

  // Error{corrupt_file} where the kernel says that it has none.
  int row_tile() const { return tile_of(traits_.row_tile); }
  int key_tile() const { return tile_of(traits_.key_tile); }

 private:
  static int tile_of(int32_t tile) {
    if (tile > 0) return tile;
    fail(ErrorCode::corrupt_file, "a kernel that works by tiles says that its tiles have {} rows",
         tile);
  }
  void launch_with(GridSize grid, const void* params, size_t bytes, Stream stream, bool overlapped,
                   uint32_t cluster) const;

  gpu::Owned<CUmod_st> module_;
  gpu::CUfunction function_ = nullptr;  // of the module
  Traits traits_{};
  bool overlaps_ = false;  // the architecture knows griddepcontrol
};

}  // namespace fovea::kernels::cuda
