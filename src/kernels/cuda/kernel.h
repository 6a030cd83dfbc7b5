// SPDX-License-Identifier: Apache-2.0
// A variant loaded onto the current GPU, ready to launch.
#pragma once

#include <cstdint>
#include <utility>

#include "gpu/gpu.h"
#include "gpu/kernel_pack.h"
#include "gpu/launch.h"

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
  ~Kernel();
  Kernel(Kernel&& other) noexcept
      : module_(std::exchange(other.module_, nullptr)),
        function_(other.function_),
        threads_(other.threads_),
        shared_bytes_(other.shared_bytes_),
        overlaps_(other.overlaps_),
        row_tile_(other.row_tile_),
        key_tile_(other.key_tile_) {}
  Kernel& operator=(Kernel&& other) noexcept {
    std::swap(module_, other.module_);
    std::swap(function_, other.function_);
    std::swap(threads_, other.threads_);
    std::swap(shared_bytes_, other.shared_bytes_);
    std::swap(overlaps_, other.overlaps_);
    std::swap(row_tile_, other.row_tile_);
    std::swap(key_tile_, other.key_tile_);
    return *this;
  }

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

  int row_tile() const { return row_tile_; }
  int key_tile() const { return key_tile_; }

 private:
  void launch_with(GridSize grid, const void* params, size_t bytes, Stream stream,
                   bool overlapped = false, uint32_t cluster = 1) const;

  gpu::CUmodule module_ = nullptr;
  gpu::CUfunction function_ = nullptr;
  int threads_ = 0;
  int shared_bytes_ = 0;
  bool overlaps_ = false;  // the architecture knows griddepcontrol
  int row_tile_ = 0;
  int key_tile_ = 0;
};

}  // namespace fovea::kernels::cuda
