// SPDX-License-Identifier: Apache-2.0
// Launching kernels one by one, or all that a call launches as one graph: that takes the host 1.7
// us where nothing changed since the last time, one launch 3.5 (H200, 2026-11-22).
#pragma once

#include <cstddef>
#include <vector>

#include "gpu/gpu.h"

namespace fovea::gpu {

struct KernelLaunch {
  CUfunction function = nullptr;
  unsigned grid_x = 1, grid_y = 1;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  unsigned cluster = 1;     // blocks of a cluster along x
  bool overlapped = false;  // with programmatic serialization behind the launch before

  bool operator==(const KernelLaunch&) const = default;
};

// Enqueues one launch of a kernel that takes one block of parameters by value; inside
// LaunchGroup::submit() on the same thread and stream it becomes part of the group.
void launch(const KernelLaunch& kernel, const void* params, size_t bytes, Stream stream);

// The launches of one call that is repeated: groups of the same kernels in the same order reuse a
// graph, in which parameters and grids that are other ones than the last time are set anew. Not for
// several threads at a time; must be destroyed before the kernels are unloaded.
class LaunchGroup {
 public:
  // Enqueues what work() launches on `stream`, which must be kernels through launch() only. If it
  // throws, nothing is enqueued. In a capture and with more than 16 kernels they are plain
  // launches. The first kernel of a graph does not overlap with what is before it.
  template <typename Work>
  void submit(Stream stream, Work&& work) {
    if (!begin(stream)) return work();
    try {
      work();
    } catch (...) {
      abandon();
      throw;
    }
    end();
  }

 private:
  friend void launch(const KernelLaunch&, const void*, size_t, Stream);

  struct Built {
    std::vector<KernelLaunch> launches;  // as they are in the graph
    std::vector<std::byte> bytes;        // likewise their parameters
    std::vector<CUgraphNode> nodes;
    Graph graph;
  };

  bool begin(Stream stream);  // false: plain launches
  void abandon();
  void end();
  void* params(size_t index);
  bool same_kernels(const Built& built) const;
  Built& build();
  void set_changed(Built& built);

  Stream stream_ = nullptr;
  std::vector<KernelLaunch> launches_;
  std::vector<size_t> params_;  // where those of each launch begin in bytes_
  std::vector<std::byte> bytes_;
  std::vector<Built> built_;
};

}  // namespace fovea::gpu
