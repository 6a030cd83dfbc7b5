// SPDX-License-Identifier: Apache-2.0
#include "gpu/launch.h"

#include <algorithm>
#include <cstring>

namespace fovea::gpu {
namespace {

// Longer groups, whose number hangs on lengths, would be built again and again.
constexpr size_t kMaxKernels = 16;

thread_local LaunchGroup* collecting = nullptr;

void launch_now(const KernelLaunch& kernel, void* params, Stream stream) {
  CUlaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (kernel.overlapped) {
    attributes[count].id = kLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].value.programmatic_stream_serialization = 1;
  }
  if (kernel.cluster > 1) {
    attributes[count].id = kLaunchAttributeClusterDimension;
    attributes[count++].value.cluster = {kernel.cluster, 1, 1};
  }
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

// Of the kernel that was captured last.
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

// A node that is set is sent again with the launch, even with the same parameters: 1.4 us.
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
