// SPDX-License-Identifier: Apache-2.0
// Batches for the kernels that plan from lengths on the device, and device memory with guards.
// Skipped without a Hopper GPU; tests/emulation runs them on the CPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gpu/gpu.h"
#include "kernels/cuda/common/prefill_params.h"
#include "support/gpu_kernel_test.h"

namespace fovea::kernels::cuda {

constexpr int32_t kGuard = 0x5a5a5a5a;

struct Batch {
  std::string name;
  std::vector<std::pair<int32_t, int32_t>> requests;  // q_len, kv_len
  int32_t q_heads = 8, kv_heads = 2;
  int32_t window = 0;
  int32_t min_planned_q_len = 0, max_planned_q_len = 0;  // as the plan has them
  bool alike = false;                                    // all requests are equal
  bool whole = false;                                    // decode on 132 CTAs cuts no tile

  bool planned(size_t i) const {
    const int32_t q_len = requests[i].first;
    return max_planned_q_len == 0 || (q_len >= min_planned_q_len && q_len <= max_planned_q_len);
  }
  int32_t group() const { return q_heads / kv_heads; }
  // Returns the keys that tokens [first, last] see: causal, window.
  std::pair<int32_t, int32_t> keys(size_t i, int32_t first, int32_t last) const {
    const auto [q_len, kv_len] = requests[i];
    const int32_t prefix = kv_len - q_len;
    const int32_t begin = window ? std::max(0, prefix + first - window + 1) : 0;
    const int32_t end = std::max(0, std::min(kv_len, prefix + last + 1));
    return {begin, std::max(begin, end)};
  }
};

inline void PrintTo(const Batch& batch, std::ostream* to) { *to << batch.name; }

inline std::vector<Batch> batches() {
  std::vector<Batch> all = {
      {"one", {{1, 1}}},
      {"one_long", {{1, 70000}}, 32, 8},
      {"empties", {{0, 0}, {1, 0}, {0, 50}, {1, 33}, {2, 2}}},
      {"before_the_first_key", {{64, 51}, {20, 1}, {4, 2}, {1, 0}, {300, 0}, {500, 140}, {1, 40}}},
      {"rows", {{1, 900}, {8, 900}, {17, 900}, {3, 3}}, 6, 2},
      {"window", {{1, 5000}, {4, 90}, {5, 1700}}, 8, 2, 100},
      {"mixed_short", {{300, 300}, {1, 6000}, {8, 100}, {9, 100}, {1, 1}}, 8, 2, 0, 0, 8},
      {"mixed_long", {{300, 300}, {1, 6000}, {8, 100}, {9, 100}, {131, 1400}}, 8, 2, 0, 9, 1 << 30},
      {"mixed_none", {{300, 300}, {40, 100}}, 8, 2, 0, 0, 8},
  };
  for (const int32_t kv_len : {300, 700, 1500, 9000}) {
    for (const int32_t count : {1, 5, 20}) {
      Batch batch{"alike_" + std::to_string(count) + "x" + std::to_string(kv_len)};
      batch.requests.assign(static_cast<size_t>(count), {1, kv_len});
      batch.alike = true;
      all.push_back(batch);
    }
  }
  // Requests that arrived in several passes: their lengths differ by the passes between.
  for (const int32_t count : {66, 130, 201}) {
    Batch batch{"nearly_alike_" + std::to_string(count)};
    for (int32_t i = 0; i < count; ++i) batch.requests.push_back({1, 1024 + i % 9});
    batch.whole = true;
    all.push_back(batch);
  }
  all.push_back({"prompts", std::vector<std::pair<int32_t, int32_t>>(19, {300, 900}), 32, 8});
  std::mt19937 random(3);
  for (const int32_t count : {64, 300, 1500}) {
    Batch batch{"random_" + std::to_string(count), {}, 32, 8};
    for (int32_t i = 0; i < count; ++i) {
      const auto kv_len = static_cast<int32_t>(random() % 3000);
      batch.requests.push_back({std::min(kv_len, 1 + static_cast<int32_t>(random() % 3)), kv_len});
    }
    all.push_back(batch);
  }
  return all;
}

// Device memory of `count` elements, followed by a guard that must not change.
template <typename T>
class Guarded {
 public:
  explicit Guarded(size_t count) : count_(count), buffer_(count * sizeof(T) + kBytes) {
    gpu::fill_bytes(buffer_.data(), kGuard & 0xff, buffer_.bytes(), nullptr);
  }
  explicit Guarded(const std::vector<T>& values) : Guarded(values.size()) {
    gpu::copy_to_device(data(), values.data(), values.size() * sizeof(T), nullptr);
  }
  T* data() const { return buffer_.template data<T>(); }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    gpu::copy_to_host(values.data(), buffer_.data(), count_ * sizeof(T), nullptr);
    std::vector<uint8_t> guard(kBytes);
    gpu::copy_to_host(guard.data(), reinterpret_cast<const uint8_t*>(data() + count_), kBytes,
                      nullptr);
    gpu::synchronize(nullptr);
    EXPECT_TRUE(std::ranges::all_of(guard, [](uint8_t b) { return b == (kGuard & 0xff); }))
        << "written behind " << count_ << " elements";
    return values;
  }

 private:
  static constexpr size_t kBytes = 4096;
  size_t count_;
  gpu::DeviceBuffer buffer_;
};

class Planners : public test::GpuKernelTest<::testing::TestWithParam<Batch>, 90> {
 protected:
  void SetUp() override {
    GpuKernelTest::SetUp();
    if (IsSkipped()) return;
    std::vector<int32_t> indptr{0}, lens;
    for (const auto& [q_len, kv_len] : batch().requests) {
      indptr.push_back(indptr.back() + q_len);
      lens.push_back(kv_len);
    }
    q_indptr_host = indptr;
    q_indptr.emplace(indptr);
    kv_lens.emplace(lens);
    params.q_indptr = q_indptr->data();
    params.kv_lens = kv_lens->data();
    params.requests = static_cast<int32_t>(lens.size());
    params.q_heads = batch().q_heads;
    params.kv_heads = batch().kv_heads;
    params.min_planned_q_len = batch().min_planned_q_len;
    params.max_planned_q_len = batch().max_planned_q_len;
    params.mask.causal = 1;
    params.mask.window = batch().window;
  }
  const Batch& batch() const { return GetParam(); }

  std::vector<int32_t> q_indptr_host;
  std::optional<Guarded<int32_t>> q_indptr, kv_lens;
  BatchParams params{};
};

}  // namespace fovea::kernels::cuda
