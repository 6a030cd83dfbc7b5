// SPDX-License-Identifier: Apache-2.0
// Launches kernels one by one, or all kernels of a call as one graph, which takes the host less
// time if its kernels did not change since the last call.
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

#include "gpu/gpu.h"

namespace fovea::gpu {

struct KernelLaunch {
  CUfunction function = nullptr;
  unsigned grid_x = 1, grid_y = 1;
  unsigned threads = 0;
  unsigned shared_bytes = 0;
  unsigned cluster = 1;     // blocks of a cluster along x
  bool overlapped = false;  // uses programmatic serialization after the preceding launch

  bool operator==(const KernelLaunch&) const = default;
};

// The block of parameters that a kernel takes by value. Refers to the caller's object.
class ParamBlock {
 public:
  template <typename Params>
  ParamBlock(const Params& params) : data_(&params), bytes_(sizeof(params)) {
    static_assert(std::is_trivially_copyable_v<Params>);
  }
  const void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  const void* data_;
  size_t bytes_;
};

// Holds the driver's description of a launch on a stream.
class LaunchConfig {
 public:
  LaunchConfig(const KernelLaunch& kernel, Stream stream);
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
  const CUlaunchConfig* get() const { return &config_; }

 private:
  CUlaunchAttribute attributes_[2] = {};
  CUlaunchConfig config_;
};

class LaunchGroup;

// The destination of launches: a stream, which runs them at once, or a group that collects them. A
// Stream converts to the former; LaunchGroup::collect() returns the latter.
struct Launcher {
  Launcher(Stream to) : stream(to) {}
  Launcher(Stream to, LaunchGroup& collector) : stream(to), group(&collector) {}

  Stream stream;
  LaunchGroup* group = nullptr;
};

// The launches of one call that is repeated. Calls that launch the same kernels in the same order
// share a graph, in which only changed parameters and grids are set again. Not thread-safe; must be
// destroyed before the kernels are unloaded.
class LaunchGroup {
 public:
  // Begins a call and returns the launcher for all its kernels. Forgets launches of a call that did
  // not end. While `stream` is being captured, kernels are launched on it at once.
  Launcher collect(Stream stream);
  // Adds a launch; called by launchers.
  void add(const KernelLaunch& kernel, ParamBlock params);
  // Ends the call: launches the collected kernels as one graph, or one by one if there are more
  // than 16. The first kernel of a graph does not overlap with the work before it.
  void launch();

 private:
  struct Built {
    std::vector<KernelLaunch> launches;  // as in the graph
    std::vector<std::byte> bytes;        // their parameters in the graph
    std::vector<CUgraphNode> nodes;
    Graph graph;
  };

  void* params(size_t index);
  bool same_kernels(const Built& built) const;
  Built& build();
  void set_changed(Built& built);

  Stream stream_ = nullptr;
  std::vector<KernelLaunch> launches_;
  std::vector<size_t> params_;  // offset of each launch's parameters in bytes_
  std::vector<std::byte> bytes_;
  std::vector<Built> built_;
};

}  // namespace fovea::gpu
