// SPDX-License-Identifier: Apache-2.0
// Random trees of drafts, and arrays and pools of the device under test.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "fovea/speculation.h"
#include "support/device_array.h"
#include "support/test_device.h"

namespace fovea::test {

// An array in the memory of the test device.
template <typename T>
class Shared {
 public:
  explicit Shared(std::vector<T> values) : host_(std::move(values)) {
    if (on_gpu()) device_ = to_device(host_);
  }
  explicit Shared(size_t count) : Shared(std::vector<T>(count)) {}

  T* data() { return on_gpu() ? device_.template data<T>() : host_.data(); }
  std::span<T> view() { return {data(), host_.size()}; }
  const std::vector<T>& read() const {
    if (on_gpu()) host_ = to_host<T>(device_, host_.size());
    return host_;
  }
  void write(const std::vector<T>& values) {
    host_ = values;
    if (on_gpu()) device_ = to_device(host_);
  }

 private:
  mutable std::vector<T> host_;
  gpu::DeviceBuffer device_;
};

// Trees of random shapes, deep ones and flat ones; some nodes are unused.
struct DraftTree {
  DraftTree(int32_t count, int32_t nodes_each, std::mt19937& random)
      : requests(count),
        width(nodes_each),
        tokens(static_cast<size_t>(requests) * static_cast<size_t>(width)),
        parents(tokens.size(), -1),
        lens(static_cast<size_t>(requests)) {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto node = static_cast<int32_t>(i) % width;
      tokens[i] = static_cast<int32_t>(random() % 50);
      if (node == 0 || random() % 8 == 0) continue;
      const bool deep = static_cast<int32_t>(i) / width % 2 == 0;
      const int32_t reach = deep ? std::min(node, 3) : node;
      parents[i] = node - 1 - static_cast<int32_t>(random() % static_cast<uint32_t>(reach));
    }
  }

  size_t nodes() const { return tokens.size(); }
  size_t at(int32_t request, int32_t node) const {
    return static_cast<size_t>(request * width + node);
  }
  // The nodes from the root, or from an unused node, to this one.
  std::vector<int32_t> path(int32_t request, int32_t node) const {
    std::vector<int32_t> path;
    for (; node >= 0; node = parents[at(request, node)]) path.insert(path.begin(), node);
    return path;
  }
  std::vector<int32_t> children(int32_t request, int32_t parent) const {
    std::vector<int32_t> found;
    for (int32_t node = 1; node < width; ++node) {
      if (parents[at(request, node)] == parent) found.push_back(node);
    }
    return found;
  }
  Drafts view() {
    shared_tokens.write(tokens);
    shared_parents.write(parents);
    shared_lens.write(lens);
    return {requests, width, shared_tokens.view(), shared_parents.view(), shared_lens.view()};
  }

  int32_t requests, width;
  std::vector<int32_t> tokens, parents, lens;
  Shared<int32_t> shared_tokens{0}, shared_parents{0}, shared_lens{0};
};

// A pool full of random bytes, and the bytes that it should have after moves.
class FilledPool {
 public:
  static constexpr int64_t kPages = 30;

  FilledPool(const KvCacheSpec& spec, bool window, Device device, std::mt19937& random) {
    const int64_t full_slots = kPages * spec.page_size;
    if (window) {
      auto pool = make_window_kv_pool(spec, kPages, full_slots, device);
      std::vector<int64_t> slots(static_cast<size_t>(full_slots - spec.page_size));
      std::iota(slots.begin(), slots.end(), spec.page_size);
      std::shuffle(slots.begin(), slots.end(), random);  // so that pages trade places
      EXPECT_TRUE(pool->map(slots));
      pool->publish(nullptr);
      pool_ = std::move(pool);
    } else {
      pool_ = make_kv_pool(spec, kPages, device);
    }
    twin_ = make_kv_pool(plain(spec), kPages);
    for (const auto& [at, bytes] : blocks()) {
      std::vector<char> block(bytes);
      for (char& byte : block) byte = static_cast<char>(random());
      std::memcpy(at.twin, block.data(), bytes);
      store(at.pool, block);
    }
  }

  KvPool& pool() { return *pool_; }
  // The expected bytes, on the CPU. For a window pool its slots are mapped ones.
  KvPool& twin() { return *twin_; }

  // Distinct slots, in random order.
  std::vector<int64_t> random_slots(size_t count, std::mt19937& random) const {
    std::vector<int64_t> slots(static_cast<size_t>((kPages - 1) * pool_->spec().page_size));
    std::iota(slots.begin(), slots.end(), pool_->spec().page_size);
    std::shuffle(slots.begin(), slots.end(), random);
    if (slots.size() < count) slots.resize(count, -1);  // as padding has them
    slots.resize(count);
    return slots;
  }

  // Copies a token's rows in the twin, value by value.
  void expect_move(int64_t from, int64_t to) {
    from = mapped(from), to = mapped(to);
    if (from < 0 || to < 0) return;
    const KvCacheSpec& spec = pool_->spec();
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
      const KvLayerView view = twin_->layer(layer);
      for (int32_t head = 0; head < spec.kv_heads; ++head) {
        const size_t k_bytes = view.layout == KvLayout::mla_fp8_rows
                                   ? 656
                                   : static_cast<size_t>(spec.head_dim) * dtype_bytes(view.dtype);
        std::memmove(k_address(view, to, head), k_address(view, from, head), k_bytes);
        if (view.layout == KvLayout::mha) {
          std::memmove(v_address(view, to, head), v_address(view, from, head),
                       static_cast<size_t>(spec.head_dim_v) * dtype_bytes(view.dtype));
        }
        if (view.scale != KvScale::per_token_head) continue;
        for (float* scales : {view.k_scale, view.v_scale}) {
          scales[to * spec.kv_heads + head] = scales[from * spec.kv_heads + head];
        }
      }
    }
  }

  bool as_expected() {
    bool equal = true;
    for (const auto& [at, bytes] : blocks()) {
      equal &= std::memcmp(load(at.pool, bytes).data(), at.twin, bytes) == 0;
    }
    return equal;
  }

 private:
  struct Block {
    char *pool, *twin;
  };

  static KvCacheSpec plain(KvCacheSpec spec) {
    spec.window = 0;
    return spec;
  }
  int64_t mapped(int64_t slot) const {
    const auto map = pool_->slot_map();
    return slot < 0 || map.empty() ? slot : map[static_cast<size_t>(slot)];
  }
  // K, V and scales of every layer.
  std::vector<std::pair<Block, size_t>> blocks() {
    std::vector<std::pair<Block, size_t>> all;
    const KvCacheSpec& spec = pool_->spec();
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
      const KvLayerView view = pool_->layer(layer), twin = twin_->layer(layer);
      const auto bytes = [&](int64_t page_stride) {
        return static_cast<size_t>(kPages * page_stride) * dtype_bytes(view.dtype);
      };
      all.push_back({{view.k, twin.k}, bytes(view.k_page_stride)});
      if (view.layout == KvLayout::mha)
        all.push_back({{view.v, twin.v}, bytes(view.v_page_stride)});
      if (view.scale != KvScale::per_token_head) continue;
      const size_t scales = static_cast<size_t>(view.slots * spec.kv_heads) * sizeof(float);
      const auto add = [&](float* a, float* b) {
        all.push_back({{reinterpret_cast<char*>(a), reinterpret_cast<char*>(b)}, scales});
      };
      add(view.k_scale, twin.k_scale);
      if (view.v_scale != view.k_scale) add(view.v_scale, twin.v_scale);
    }
    return all;
  }
  static void store(char* to, const std::vector<char>& bytes) {
    if (!on_gpu()) {
      std::memcpy(to, bytes.data(), bytes.size());
      return;
    }
    gpu::copy_to_device(to, bytes.data(), bytes.size(), nullptr);
    gpu::synchronize(nullptr);
  }
  static std::vector<char> load(const char* from, size_t bytes) {
    std::vector<char> copy(bytes);
    if (on_gpu()) {
      gpu::copy_to_host(copy.data(), from, bytes, nullptr);
      gpu::synchronize(nullptr);
    } else {
      std::memcpy(copy.data(), from, bytes);
    }
    return copy;
  }

  std::unique_ptr<KvPool> pool_, twin_;
};

class SpeculationFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_test_device().empty()) GTEST_SKIP() << why_no_test_device();
    if (on_gpu()) context_.emplace(0);
    if (context_) context_->bind();
  }
  static Device device() { return test_device().device(); }
  std::unique_ptr<Speculation> make(const SpeculationLimits& limits, std::vector<KvPool*> pools) {
    return make_speculation(limits, pools, device(), on_gpu() ? nullptr : &threads_);
  }

  std::optional<gpu::Context> context_;
  ThreadPool threads_{2};
};

}  // namespace fovea::test
