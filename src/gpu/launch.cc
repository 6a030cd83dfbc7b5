// SPDX-License-Identifier: Apache-2.0
#include "gpu/launch.h"

#include <algorithm>
#include <cstring>

namespace fovea::gpu {
namespace {

// Longer groups, whose number hangs on lengths, would be built again and again.
constexpr size_t kMostKernels = 16;

thread_local LaunchGroup* collecting = nullptr;

CUlaunchAttribute cluster_attribute(unsigned cluster) {
  CUlaunchAttribute attribute{};
  attribute.id = kLaunchAttributeClusterDimension;
  attribute.value.cluster = {cluster, 1, 1};
  return attribute;
}

void launch_now(const KernelLaunch& kernel, void* params, Stream stream) {
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (kernel.overlapped) {
    attributes[count].id = kLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  if (kernel.cluster > 1) attributes[count++] = cluster_attribute(kernel.cluster);
  const CUlaunchConfig config{.grid_x = kernel.grid_x,
                              .grid_y = kernel.grid_y,
                              .grid_z = 1,
                              .block_x = kernel.threads,
                              .block_y = 1,
                              .block_z = 1,
                              .shared_bytes = kernel.shared_bytes,
                              .stream = stream,
                              .attributes = attributes,
                              .attribute_count = count};
  check(driver().launch(&config, kernel.function, &params, nullptr), "cuLaunchKernelEx");
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

}  // namespace

void launch(const KernelLaunch& kernel, const void* params, size_t bytes, Stream stream) {
  if (collecting == nullptr || collecting->stream_ != stream) {
    return launch_now(kernel, const_cast<void*>(params), stream);
  }
  std::vector<std::byte>& all = collecting->bytes_;
  const auto* first = static_cast<const std::byte*>(params);
  collecting->params_.push_back(all.size());
  all.insert(all.end(), first, first + bytes);
  collecting->launches_.push_back(kernel);
}

LaunchGroup::~LaunchGroup() {
  for (const Built& built : built_) {
    if (built.exec) driver().graph_exec_destroy(built.exec);
    if (built.graph) driver().graph_destroy(built.graph);
  }
}

bool LaunchGroup::begin(Stream stream) {
  CUstreamCaptureStatus status{};
  check(driver().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  if (status != kCaptureStatusNone || collecting != nullptr) return false;
  stream_ = stream;
  launches_.clear();
  params_.clear();
  bytes_.clear();
  collecting = this;
  return true;
}

void LaunchGroup::abandon() { collecting = nullptr; }

void* LaunchGroup::params(size_t index) { return bytes_.data() + params_[index]; }

void LaunchGroup::end() {
  collecting = nullptr;
  if (launches_.size() == 1 || launches_.size() > kMostKernels) {
    for (size_t i = 0; i < launches_.size(); ++i) launch_now(launches_[i], params(i), stream_);
    return;
  }
  if (launches_.empty()) return;
  const auto found =
      std::ranges::find_if(built_, [&](const Built& built) { return same_kernels(built); });
  const Built& built = found != built_.end() ? *found : build();
  for (size_t i = 0; i < launches_.size(); ++i) {
    void* argument = params(i);
    const CUkernelNodeParams node = node_params(launches_[i], &argument);
    check(driver().graph_exec_set_kernel(built.exec, built.nodes[i], &node),
          "cuGraphExecKernelNodeSetParams");
  }
  check(driver().graph_launch(built.exec, stream_), "cuGraphLaunch");
}

bool LaunchGroup::same_kernels(const Built& built) const {
  const auto same = [](const KernelLaunch& a, const KernelLaunch& b) {
    return a.function == b.function && a.cluster == b.cluster && a.overlapped == b.overlapped;
  };
  return built.exec != nullptr && std::ranges::equal(built.launches, launches_, same);
}

// A line of nodes; where a kernel overlaps, its edge is programmatic.
LaunchGroup::Built& LaunchGroup::build() {
  Built& built = built_.emplace_back();
  built.launches = launches_;
  check(driver().graph_create(&built.graph, 0), "cuGraphCreate");
  for (size_t i = 0; i < launches_.size(); ++i) {
    const KernelLaunch& kernel = launches_[i];
    void* argument = params(i);
    const CUkernelNodeParams params = node_params(kernel, &argument);
    CUgraphNode node = nullptr;
    check(driver().graph_add_kernel(&node, built.graph, nullptr, 0, &params),
          "cuGraphAddKernelNode");
    if (kernel.cluster > 1) {
      const CUlaunchAttribute attribute = cluster_attribute(kernel.cluster);
      check(driver().graph_node_set_attribute(node, attribute.id, &attribute.value),
            "cuGraphKernelNodeSetAttribute");
    }
    if (i > 0) {
      CUgraphEdgeData edge{};
      if (kernel.overlapped) {
        edge.from_port = kGraphPortProgrammatic;
        edge.type = kGraphDependencyProgrammatic;
      }
      check(driver().graph_add_edges(built.graph, &built.nodes.back(), &node, &edge, 1),
            "cuGraphAddDependencies");
    }
    built.nodes.push_back(node);
  }
  check(driver().graph_instantiate(&built.exec, built.graph, 0), "cuGraphInstantiate");
  return built;
}

}  // namespace fovea::gpu
