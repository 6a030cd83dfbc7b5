// SPDX-License-Identifier: Apache-2.0
// The operations of a model's layers on a GPU and on the CPU, with the same inputs, all
// representable in bf16. Skipped without a GPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/float_types.h"
#include "fovea/gpu.h"
#include "gpu/cublaslt.h"
#include "gpu/gpu.h"
#include "model/cuda_device.h"
#include "model/layers.h"
#include "support/error_budget.h"
#include "support/expect_close.h"

namespace fovea {

constexpr int32_t kMaxRows = 256;

// Memory with the same contents on one device, and access to it.
class Side {
 public:
  explicit Side(std::shared_ptr<ModelDevice> device) : device_(std::move(device)) {}
  ModelDevice& operator*() const { return *device_; }
  ModelDevice* operator->() const { return device_.get(); }

  Rows rows(const std::vector<float>& values, int64_t width, DType dtype) {
    std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      store_float(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
    }
    return {upload(bytes.data(), bytes.size()), width, dtype};
  }
  Rows activations(const std::vector<float>& values, int64_t width) {
    return rows(values, width, device_->activation_dtype());
  }
  Rows floats(const std::vector<float>& values, int64_t width) {
    return rows(values, width, DType::f32);
  }
  int32_t* ints(const std::vector<int32_t>& values) {
    return static_cast<int32_t*>(upload(values.data(), values.size() * sizeof(int32_t)));
  }
  int64_t* longs(const std::vector<int64_t>& values) {
    return static_cast<int64_t*>(upload(values.data(), values.size() * sizeof(int64_t)));
  }
  void* upload(const void* from, size_t bytes) {
    memory_.push_back(device_->allocate(bytes));
    if (device_->kind() == DeviceKind::cpu) {
      std::memcpy(memory_.back().get(), from, bytes);
    } else {
      gpu::copy_to_device(memory_.back().get(), from, bytes, device_->stream());
      gpu::synchronize(device_->stream());
    }
    return memory_.back().get();
  }
  template <typename T>
  std::vector<T> read(const void* from, size_t count) {
    std::vector<T> values(count);
    if (device_->kind() == DeviceKind::cpu) {
      std::memcpy(values.data(), from, count * sizeof(T));
    } else {
      gpu::copy_to_host(values.data(), from, count * sizeof(T), device_->stream());
      gpu::synchronize(device_->stream());
    }
    return values;
  }
  std::vector<float> read(Rows rows, size_t count) {
    const std::vector<std::byte> bytes =
        read<std::byte>(rows.data, count * dtype_bytes(rows.dtype));
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) {
      values[i] = load_float(bytes.data(), rows.dtype, static_cast<int64_t>(i));
    }
    return values;
  }
  const StoredTensor& tensor(const std::vector<float>& values) {
    std::vector<uint16_t>& bits = stored_.emplace_back();
    for (const float value : values) bits.push_back(float_to_bf16(value));
    StoredTensor& tensor = tensors_.emplace_back();
    tensor.dtype = DType::bf16;
    tensor.data = reinterpret_cast<const std::byte*>(bits.data());
    tensor.bytes = bits.size() * 2;
    return tensor;
  }
  Linear linear(const std::vector<float>& weight, int32_t n, int32_t k, bool is_kn,
                const std::vector<float>& bias = {}) {
    Linear linear;
    linear.weight = device_->place(tensor(weight), "weight");
    linear.dtype = DType::bf16;
    linear.n = n;
    linear.k = k;
    linear.stride = is_kn ? n : k;
    linear.is_kn = is_kn;
    if (!bias.empty()) linear.bias = device_->place(bias).data();
    return linear;
  }

 private:
  std::shared_ptr<ModelDevice> device_;
  std::deque<std::shared_ptr<std::byte>> memory_;
  std::deque<std::vector<uint16_t>> stored_;
  std::deque<StoredTensor> tensors_;
};

class ModelDevices : public testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_gpu().empty()) GTEST_SKIP() << why_no_gpu();
    ASSERT_EQ(gpu::why_no_cublaslt(), "");
  }

  std::vector<float> random(size_t count, float scale = 1) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> values(count);
    for (float& value : values) value = bf16_to_float(float_to_bf16(normal(random_)));
    return values;
  }
  std::vector<int32_t> random_ints(size_t count, int32_t end) {
    std::vector<int32_t> values(count);
    for (int32_t& value : values)
      value = static_cast<int32_t>(random_() % static_cast<uint32_t>(end));
    return values;
  }

  // Runs body(side), which computes on one device and returns its rows.
  template <typename Body>
  void expect_same(DType out, size_t width, const Body& body, const std::string& what) {
    expect_same(out == DType::f32 ? test::kLayerOpF32Budget : test::kLayerOpBf16Budget, width, body,
                what);
  }
  template <typename Body>
  void expect_same(const test::ErrorBudget& budget, size_t width, const Body& body,
                   const std::string& what) {
    const std::vector<float> want = body(host()), got = body(cuda());
    ASSERT_EQ(want.size(), got.size());
    ASSERT_EQ(want.size() % width, 0u) << what;
    for (size_t row = 0; row < want.size(); row += width) {
      float most = 0;
      for (size_t i = row; i < row + width; ++i) most = std::max(most, std::fabs(want[i]));
      for (size_t i = row; i < row + width; ++i) {
        ASSERT_TRUE(test::is_near(got[i], want[i], budget.units * budget.unit * most))
            << what << ": row " << row / width << ", column " << i - row;
      }
    }
  }

  Side& host() {
    if (!host_) host_.emplace(make_host_device(threads_));
    return *host_;
  }
  Side& cuda() {
    if (!cuda_) cuda_.emplace(make_cuda_device({.max_rows = kMaxRows}));
    return *cuda_;
  }

  std::mt19937 random_{7};
  ThreadPool threads_{2};
  std::optional<Side> host_, cuda_;
};

}  // namespace fovea
