// SPDX-License-Identifier: Apache-2.0
// Runs a model on the CPU with f32 activations. Weights stay in the mapped checkpoint; random
// weights have their own memory.
#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <map>
#include <new>

#include "core/check.h"
#include "kernels/cpu/cpu.h"
#include "model/host_experts.h"

namespace fovea {
namespace {

using kernels::HeadView;

HeadView view_of(const HeadRows& rows) {
  return {static_cast<float*>(rows.data), rows.token_stride, rows.head_stride};
}

kernels::RmsNormParams norm_params(const Norm& norm, HeadView x, HeadView out, int64_t rows,
                                   int32_t heads) {
  kernels::RmsNormParams params;
  params.x = x;
  params.out = out;
  params.weight = norm.weight.data();
  params.weight_plus_one = norm.plus_one;
  params.epsilon = norm.epsilon;
  params.rows = rows;
  params.heads = heads;
  params.dim = norm.dim();
  return params;
}

kernels::DividedNormParams divided_norm_params(const DividedNorm& step) {
  return {.x = step.x.floats(),
          .x_row_stride = step.x.stride,
          .gate = step.gate.floats(),
          .gate_row_stride = step.gate.stride,
          .out = step.out.floats(),
          .out_row_stride = step.out.stride,
          .squares = step.squares,
          .weight = step.norm.weight.data(),
          .weight_plus_one = step.norm.plus_one,
          .epsilon = step.norm.epsilon,
          .rows = step.rows,
          .dim = step.norm.dim(),
          .parts = step.parts};
}

kernels::GemmParams gemm_params(const Linear& weights, Rows x, Rows out, int64_t rows) {
  kernels::GemmParams params;
  params.x = x.floats();
  params.x_stride = x.stride;
  params.weight = weights.weight;
  params.weight_dtype = weights.dtype;
  params.weight_stride = weights.stride;
  params.weight_is_kn = weights.is_kn;
  params.bias = weights.bias;
  params.out = out.floats();
  params.out_stride = out.stride;
  params.rows = static_cast<int32_t>(rows);
  params.n = weights.n;
  params.k = weights.k;
  return params;
}

void norm_heads(const Norm& norm, HeadView x, HeadView out, int64_t rows, int32_t heads,
                ThreadPool& threads) {
  kernels::rms_norm(norm_params(norm, x, out, rows, heads), threads);
}

class HostDevice final : public ModelDevice {
 public:
  HostDevice(ThreadPool& threads, const ModelRanks& ranks) : threads_(threads), ranks_(ranks) {}

  DeviceKind kind() const override { return DeviceKind::cpu; }
  int sm() const override { return 0; }
  ThreadPool* threads() const override { return &threads_; }
  Stream stream() const override { return nullptr; }
  DType activation_dtype() const override { return DType::f32; }
  Communicator* ranks() const override { return ranks_.communicator; }
  int64_t largest_of_ranks(int64_t value) override {
    if (ranks() != nullptr) ranks()->all_reduce(&value, &value, 1, DType::i64, ReduceOp::max);
    return value;
  }
  bool shares_contexts() const override { return ranks_.share_contexts; }
  bool divides_experts() const override { return ranks_.divide_experts; }

  const std::byte* place(const StoredTensor& tensor, std::string_view) override {
    if (tensor.data != nullptr) return tensor.data;
    std::shared_ptr<std::byte>& owned = made_[&tensor];
    if (owned == nullptr) {
      owned = allocate(tensor.bytes);
      tensor.read(0, {owned.get(), tensor.bytes});
      owned_bytes_ += tensor.bytes;
    }
    return owned.get();
  }
  const std::byte* place_joined(std::span<const StoredTensor* const>, std::string_view) override {
    return nullptr;  // joining would copy mapped bytes
  }
  std::span<const float> place(std::vector<float> values) override {
    owned_bytes_ += values.size() * sizeof(float);
    vectors_.push_back(std::move(values));
    return vectors_.back();
  }
  const int32_t* place_ints(std::vector<int32_t> values) override {
    owned_bytes_ += values.size() * sizeof(int32_t);
    ints_.push_back(std::move(values));
    return ints_.back().data();
  }
  std::unique_ptr<Experts> place(std::vector<MlpParts> experts, bool weights_scale_input) override {
    return make_host_experts(std::move(experts), weights_scale_input, *this);
  }
  size_t weight_bytes() const override { return owned_bytes_; }
  size_t product_bytes() const override { return 0; }
  size_t vector_bytes(size_t count) const override { return count * sizeof(float); }

  std::shared_ptr<std::byte> allocate(size_t bytes) override {
    constexpr std::align_val_t kAlignment{64};
    return {static_cast<std::byte*>(::operator new(bytes, kAlignment)),
            [](std::byte* owned) { ::operator delete(owned, kAlignment); }};
  }

  void linear(const Linear& weights, Rows x, Rows out, int64_t rows) override {
    kernels::cpu::gemm(gemm_params(weights, x, out, rows), threads_);
  }
  void linears(std::span<const Product> products, Rows x, int64_t rows) override {
    std::array<kernels::GemmParams, kernels::cpu::kMaxGemms> params;
    check_argument(products.size() <= params.size(), "{} products, must be at most {}",
                   products.size(), params.size());
    std::ranges::transform(products, params.begin(), [&](const Product& product) {
      return gemm_params(product.weights, x, product.out, rows);
    });
    kernels::cpu::gemms({params.data(), products.size()}, threads_);
  }

  void store_rows(Rows from, Rows to, const int64_t* index, int64_t rows, int64_t width) override {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t place = index != nullptr ? index[row] : row;
      if (place < 0) continue;
      std::copy_n(from.floats() + row * from.stride, width, to.floats() + place * to.stride);
    }
  }
  void spread_columns(Rows x, Rows out, const int32_t* index, int64_t rows,
                      int64_t width) override {
    for (int64_t row = 0; row < rows; ++row) {
      const float* const from = x.floats() + row * x.stride;
      float* const to = out.floats() + row * out.stride;
      for (int64_t c = 0; c < width; ++c)
        to[c] = index[c] < 0 ? -std::numeric_limits<float>::infinity() : from[index[c]];
    }
  }
  void copy_rows(Rows from, Rows to, int64_t rows, int64_t width) override {
    for (int64_t row = 0; row < rows; ++row) {
      std::copy_n(from.floats() + row * from.stride, width, to.floats() + row * to.stride);
    }
  }

  void residual(const ResidualStep& step) override {
    if (step.branch != nullptr) {
      if (step.is_part) {
        ranks_.communicator->all_reduce(step.branch, step.branch, step.rows * step.dim, DType::f32,
                                        ReduceOp::sum);
      }
      const HeadView branch{step.branch, step.dim, step.dim};
      if (step.branch_norm) norm_heads(step.branch_norm, branch, branch, step.rows, 1, threads_);
      kernels::add(step.x, step.branch, step.branch_factor, step.rows * step.dim, threads_);
    }
    if (step.normed.data == nullptr) return;
    const HeadView normed{step.normed.floats(), step.normed.stride, step.normed.stride};
    if (!step.norm) {
      for (int64_t row = 0; row < step.rows; ++row) {
        std::copy_n(step.x + row * step.dim, step.dim, normed.data + row * normed.row_stride);
      }
      return;
    }
    norm_heads(step.norm, {step.x, step.dim, step.dim}, normed, step.rows, 1, threads_);
  }

  void prepare_heads(const HeadSteps& steps, HeadRows x, int64_t rows, int32_t heads, int32_t dim,
                     const int32_t* positions) override {
    const HeadView view = view_of(x);
    if (steps.norm) norm_heads(steps.norm, view, view, rows, heads, threads_);
    if (steps.rotary) {
      kernels::RopeParams params;
      params.x = view;
      params.table = *steps.rotary.table;
      params.layout = steps.rotary.layout;
      params.positions = positions;
      params.rows = rows;
      params.heads = heads;
      kernels::rope(params, threads_);
    }
    if (steps.l2_epsilon) {
      kernels::RmsNormParams params;
      params.x = params.out = view;
      params.epsilon = *steps.l2_epsilon;
      params.rows = rows;
      params.heads = heads;
      params.dim = dim;
      kernels::rms_norm(params, threads_);
    }
    if (steps.scale.factor != 0) {
      kernels::ScaleRowsParams params;
      params.x = view;
      params.scale = steps.scale;
      params.positions = positions;
      params.rows = rows;
      params.heads = heads;
      params.dim = dim;
      kernels::scale_rows(params, threads_);
    }
  }

  void gated_activation(const MlpParts& parts, Rows in, Rows out, int64_t rows) override {
    kernels::GatedActivationParams params;
    params.activation = parts.activation;
    params.bounds = parts.bounds;
    params.gate = in.floats();
    params.up = in.floats() + (parts.alternates ? 1 : parts.width());
    params.in_row_stride = in.stride;
    params.in_step = parts.alternates ? 2 : 1;
    params.out = out.floats();
    params.out_row_stride = out.stride;
    params.rows = rows;
    params.dim = parts.width();
    kernels::gated_activation(params, threads_);
  }

  void sigmoid_gate(HeadRows x, HeadRows gate, int64_t rows, int32_t heads, int32_t dim,
                    int32_t gate_dim) override {
    kernels::SigmoidGateParams params;
    params.x = view_of(x);
    params.gate = view_of(gate);
    params.rows = rows;
    params.heads = heads;
    params.dim = dim;
    params.gate_dim = gate_dim;
    kernels::sigmoid_gate(params, threads_);
  }

  void delta_inputs(const kernels::DeltaInputsParams& params) override {
    kernels::delta_inputs(params, threads_);
  }
  void gated_norm(const GatedNorm& norm, HeadRows x, HeadRows gate, HeadRows out, int64_t rows,
                  int32_t heads) override {
    kernels::RmsNormParams params = norm_params(norm.norm, view_of(x), view_of(out), rows, heads);
    params.gate = view_of(gate);
    params.gate_function = norm.gate;
    params.dim = norm.dim(heads);
    if (norm.has_weights_of_heads()) params.weight_head_stride = params.dim;
    kernels::rms_norm(params, threads_);
  }
  void divided_norm_squares(const DividedNorm& step) override {
    kernels::divided_norm_squares(divided_norm_params(step), threads_);
  }
  void divided_norm_scale(const DividedNorm& step) override {
    kernels::divided_norm_scale(divided_norm_params(step), threads_);
  }
  void kda_gates(const kernels::KdaGatesParams& params) override {
    kernels::kda_gates(params, threads_);
  }
  void mamba2_inputs(const kernels::Mamba2InputsParams& params) override {
    kernels::mamba2_inputs(params, threads_);
  }
  void silu_gate(Rows x, Rows gate, Rows out, int64_t rows, int64_t width) override {
    kernels::silu_gate({.x = x.floats(),
                        .gate = gate.floats(),
                        .out = out.floats(),
                        .x_row_stride = x.stride,
                        .gate_row_stride = gate.stride,
                        .out_row_stride = out.stride,
                        .rows = rows,
                        .dim = static_cast<int32_t>(width)},
                       threads_);
  }
  void multiply(Rows x, Rows y, Rows out, int64_t rows, int64_t width) override {
    kernels::silu_gate({.x = x.floats(),
                        .gate = y.floats(),
                        .plain = true,
                        .out = out.floats(),
                        .x_row_stride = x.stride,
                        .gate_row_stride = y.stride,
                        .out_row_stride = out.stride,
                        .rows = rows,
                        .dim = static_cast<int32_t>(width)},
                       threads_);
  }
  void softplus(float* x, int64_t count) override { kernels::softplus(x, count, threads_); }

  void moe_routing(const kernels::MoeRoutingParams& params) override {
    kernels::moe_routing(params, threads_);
  }
  void embedding(const kernels::EmbeddingParams& params) override {
    kernels::embedding(params, threads_);
  }
  void gather_rows(const kernels::ExpertRowsParams& params) override {
    kernels::gather_rows(params, threads_);
  }
  void soft_cap(float* x, float cap, int64_t count) override {
    kernels::soft_cap(x, cap, count, threads_);
  }

 private:
  ThreadPool& threads_;
  const ModelRanks ranks_;
  std::deque<std::vector<float>> vectors_;
  std::deque<std::vector<int32_t>> ints_;
  std::map<const StoredTensor*, std::shared_ptr<std::byte>> made_;
  size_t owned_bytes_ = 0;
};

}  // namespace

std::unique_ptr<ModelDevice> make_host_device(ThreadPool& threads, const ModelRanks& ranks) {
  return std::make_unique<HostDevice>(threads, ranks);
}

}  // namespace fovea
