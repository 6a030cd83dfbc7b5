// SPDX-License-Identifier: Apache-2.0
#include "gpu/launch.h"

#include <algorithm>
#include <cstring>

namespace fovea::gpu {
namespace {

// Longer groups vary with sequence lengths, so their graph would be rebuilt on every call.
constexpr size_t kMaxKernels = 16;

void launch_now(const KernelLaunch& kernel, void* params, Stream stream) {
  const LaunchConfig config(kernel, stream);
  check(driver().launch(config.get(), kernel.function, &params, nullptr), "cuLaunchKernelEx");
}

CUkernelNodeParams node_params(const KernelLaunch& kernel, void** arguments) {
  return {.function = kernel.function,
          .grid_x = kernel.grid_x,
          .grid_y = kernel.grid_y,
          .grid_z = 1,
          .block_x = kernel.threads,
          .block_y = 1,
          .block_z = 1,
          .shared_bytes = kernel.shared_bytes,
          .arguments = arguments};
}

// Returns the node of the kernel that was captured last.
CUgraphNode last_node(Stream captured) {
  CUstreamCaptureStatus status{};
  const CUgraphNode* nodes = nullptr;
  const void* edges = nullptr;
  size_t count = 0;
  check(driver().stream_capture_info(captured, &status, nullptr, nullptr, &nodes, &edges, &count),
        "cuStreamGetCaptureInfo");
  return nodes[0];
}

}  // namespace

LaunchConfig::LaunchConfig(const KernelLaunch& kernel, Stream stream)
    : config_{.grid_x = kernel.grid_x,
              .grid_y = kernel.grid_y,
              .grid_z = 1,
              .block_x = kernel.threads,
              .block_y = 1,
              .block_z = 1,
              .shared_bytes = kernel.shared_bytes,
              .stream = stream,
              .attributes = attributes_,
              .attribute_count = 0} {
  unsigned& count = config_.attribute_count;
  if (kernel.overlapped) {
    attributes_[count].id = kLaunchAttributeProgrammaticStreamSerialization;
    attributes_[count++].value.programmatic_stream_serialization = 1;
  }
  if (kernel.cluster > 1) {
    attributes_[count].id = kLaunchAttributeClusterDimension;
    attributes_[count++].value.cluster = {kernel.cluster, 1, 1};
  }
}

Launcher LaunchGroup::collect(Stream stream) {
  launches_.clear();
  params_.clear();
  bytes_.clear();
  CUstreamCaptureStatus status{};
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  if (status != kCaptureStatusNone) return Launcher(stream);
  stream_ = stream;
  return Launcher(stream, *this);
}

void LaunchGroup::add(const KernelLaunch& kernel, ParamBlock params) {
  const auto* first = static_cast<const std::byte*>(params.data());
  params_.push_back(bytes_.size());
  bytes_.insert(bytes_.end(), first, first + params.bytes());
  launches_.push_back(kernel);
}

void* LaunchGroup::params(size_t index) { return bytes_.data() + params_[index]; }

void LaunchGroup::launch() {
  if (launches_.size() > kMaxKernels) {
    for (size_t i = 0; i < launches_.size(); ++i) launch_now(launches_[i], params(i), stream_);
    return;
  }
  if (launches_.empty()) return;
  const auto found =
      std::ranges::find_if(built_, [&](const Built& built) { return same_kernels(built); });
  Built& built = found != built_.end() ? *found : build();
  set_changed(built);
  built.graph.launch(stream_);
}

// Setting a node uploads it again with the launch, even if its parameters are equal.
void LaunchGroup::set_changed(Built& built) {
  for (size_t i = 0; i < launches_.size(); ++i) {
    const size_t end = i + 1 < params_.size() ? params_[i + 1] : bytes_.size();
    const size_t bytes = end - params_[i];
    std::byte* known = built.bytes.data() + params_[i];
    if (launches_[i] == built.launches[i] && std::memcmp(known, params(i), bytes) == 0) continue;
    void* argument = params(i);
    const CUkernelNodeParams node = node_params(launches_[i], &argument);
    check(driver().graph_exec_set_kernel(built.graph.exec(), built.nodes[i], &node),
          "cuGraphExecKernelNodeSetParams");
    built.launches[i] = launches_[i];
    std::memcpy(known, params(i), bytes);
  }
}

bool LaunchGroup::same_kernels(const Built& built) const {
  const auto same = [](const KernelLaunch& a, const KernelLaunch& b) {
    return a.function == b.function && a.cluster == b.cluster && a.overlapped == b.overlapped;
  };
  return std::ranges::equal(built.launches, launches_, same);
}

LaunchGroup::Built& LaunchGroup::build() {
  Built built{launches_, bytes_, {}, {}};
  const OwnedStream stream;
  built.graph = Graph::capture(stream.get(), [&](Stream captured) {
    for (size_t i = 0; i < launches_.size(); ++i) {
      launch_now(launches_[i], params(i), captured);
      built.nodes.push_back(last_node(captured));
    }
  });
  return built_.emplace_back(std::move(built));
}

}  // namespace fovea::gpu
