// SPDX-License-Identifier: Apache-2.0
// Operations of streams, and graphs of them. A stream in capture records its launches and copies;
// any other stream executes them at once.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "gpu/cuda_abi.h"

namespace fovea::emulation {

// A launch with its own copy of the parameters.
struct KernelNode {
  struct alignas(128) Block {
    std::byte bytes[128];
  };
  gpu::CUfunction function;
  gpu::CUlaunchConfig config;
  std::vector<gpu::CUlaunchAttribute> attributes;
  std::vector<Block> params;

  void set_params(const void* from, size_t bytes) {
    params.resize((bytes + sizeof(Block) - 1) / sizeof(Block));
    std::memcpy(params.data(), from, bytes);
  }
};

struct Node {
  std::shared_ptr<Node> captured;  // the node from which a graph's copy was made
  KernelNode kernel;
  std::function<void()> other;  // replaces the kernel
};
using Graph = std::vector<std::shared_ptr<Node>>;

class Streams {
 public:
  Stream create() { return reinterpret_cast<Stream>(++created_); }
  void begin_capture(Stream stream) {
    captured_ = stream;
    graph_.clear();
  }
  bool captures(Stream stream) const { return stream && stream == captured_; }
  Graph end_capture() {
    captured_ = nullptr;
    return std::exchange(graph_, {});
  }
  void add(Node node) { graph_.push_back(std::make_shared<Node>(std::move(node))); }
  Node* last() const { return graph_.back().get(); }

  // Records or executes an operation that is not a kernel.
  void tell(Stream stream, std::function<void()> work) {
    if (!captures(stream)) return work();
    add({.other = std::move(work)});
  }

 private:
  uintptr_t created_ = 0;
  Stream captured_ = nullptr;
  Graph graph_;
};

// Copies the nodes, so that parameters can be changed.
inline Graph instantiate(const Graph& graph) {
  Graph copy;
  for (const auto& node : graph) {
    copy.push_back(std::make_shared<Node>(*node));
    copy.back()->captured = node;
  }
  return copy;
}

}  // namespace fovea::emulation
