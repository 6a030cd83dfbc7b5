// SPDX-License-Identifier: Apache-2.0
// The recurrences of linear layers as operations of one interface: random inputs, the oracle and
// the kernels of every instruction set.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/reference/reference.h"
#include "linear_operation.h"

namespace fovea::kernels {

class Convolution : public Operation {
 public:
  Convolution(int32_t dim, int32_t width, bool has_bias, bool plain = false)
      : dim_(dim),
        width_(width),
        plain_(plain),
        x_(random_values(static_cast<size_t>(kTokens * dim), 5, -3, 3)),
        weight_(random_values(static_cast<size_t>(dim * width), 6, -1, 1)),
        bias_(random_values(has_bias ? static_cast<size_t>(dim) : 0, 7, -1, 1)) {}

  std::string name() const override {
    return "conv " + std::to_string(dim_) + " width " + std::to_string(width_);
  }
  int64_t state_size() const override { return int64_t{dim_} * (width_ - 1); }
  int64_t out_size() const override { return dim_; }
  std::vector<std::vector<float>*> inputs() override { return {&x_, &weight_, &bias_}; }
  void run_reference(const Batch& batch, int64_t first, float* states, float* out) const override {
    reference::causal_conv(params(batch, first, states, out));
  }
  void run(const Batch& batch, int64_t first, float* states, float* out, int team,
           cpu::Isa isa) const override {
    ThreadPool threads(team);
    cpu::causal_conv(params(batch, first, states, out), threads, isa);
  }

 private:
  CausalConvParams params(const Batch& batch, int64_t first, float* states, float* out) const {
    CausalConvParams params;
    params.batch = batch.view();
    params.x = x_.data() + first * dim_;
    params.weight = weight_.data();
    params.bias = bias_.empty() ? nullptr : bias_.data();
    params.state = states;
    params.state_slot_stride = state_stride();
    params.plain = plain_;
    params.y = out;
    params.y_token_stride = dim_;
    params.dim = dim_;
    params.width = width_;
    return params;
  }

  int32_t dim_, width_;
  bool plain_;
  std::vector<float> x_, weight_, bias_;
};

class DeltaNet : public Operation {
 public:
  DeltaNet(int32_t key_heads, int32_t value_heads, int32_t key_dim, int32_t value_dim,
           bool in_chunks = false)
      : in_chunks_(in_chunks),
        key_heads_(key_heads),
        value_heads_(value_heads),
        key_dim_(key_dim),
        value_dim_(value_dim),
        qkv_(random_values(static_cast<size_t>(kTokens * row()), 8, -1, 1)),
        log_decay_(random_values(static_cast<size_t>(kTokens * value_heads), 9, -2, 0)),
        beta_(random_values(static_cast<size_t>(kTokens * value_heads), 10, 0, 1)) {}

  std::string name() const override {
    return "delta net " + std::to_string(key_dim_) + " x " + std::to_string(value_dim_) +
           (in_chunks_ ? " in chunks" : "");
  }
  bool in_chunks() const override { return in_chunks_; }
  int64_t state_size() const override { return int64_t{value_heads_} * value_dim_ * key_dim_; }
  int64_t out_size() const override { return value_heads_ * value_dim_; }
  std::vector<std::vector<float>*> inputs() override { return {&qkv_, &log_decay_, &beta_}; }
  void run_reference(const Batch& batch, int64_t first, float* states, float* out) const override {
    ThreadPool threads(1);
    reference::gated_delta_net(params(batch, first, states, out), threads);
  }
  void run(const Batch& batch, int64_t first, float* states, float* out, int team,
           cpu::Isa isa) const override {
    ThreadPool threads(team);
    cpu::gated_delta_net(params(batch, first, states, out), threads, isa);
  }

 private:
  int64_t row() const { return 2 * key_heads_ * key_dim_ + value_heads_ * value_dim_; }

  GatedDeltaNetParams params(const Batch& batch, int64_t first, float* states, float* out) const {
    GatedDeltaNetParams params;
    params.batch = batch.view();
    params.qkv = qkv_.data() + first * row();
    params.log_decay = log_decay_.data() + first * value_heads_;
    params.beta = beta_.data() + first * value_heads_;
    params.state = states;
    params.state_slot_stride = state_stride();
    params.out = out;
    params.out_token_stride = out_size();
    params.key_heads = key_heads_;
    params.value_heads = value_heads_;
    params.key_dim = key_dim_;
    params.value_dim = value_dim_;
    params.scale = 0.25f;
    params.l2_normalise_qk = true;
    params.in_chunks = in_chunks_;
    return params;
  }

  bool in_chunks_;
  int32_t key_heads_, value_heads_, key_dim_, value_dim_;
  std::vector<float> qkv_, log_decay_, beta_;
};

// KDA, or lightning attention with `fixed` decays.
class Channelwise : public Operation {
 public:
  Channelwise(int32_t key_heads, int32_t value_heads, int32_t key_dim, int32_t value_dim,
              bool fixed, bool in_chunks = false)
      : fixed_(fixed),
        in_chunks_(in_chunks),
        key_heads_(key_heads),
        value_heads_(value_heads),
        key_dim_(key_dim),
        value_dim_(value_dim),
        qkv_(random_values(static_cast<size_t>(kTokens * row()), 15, -1, 1)),
        log_decay_(random_values(
            static_cast<size_t>(fixed ? value_heads : kTokens * value_heads * key_dim), 16, -2,
            fixed ? -0.05f : 0)),
        beta_(random_values(fixed ? 0 : static_cast<size_t>(kTokens * value_heads), 17, 0, 1)) {}

  std::string name() const override {
    return (fixed_ ? "lightning " : "kda ") + std::to_string(key_dim_) + " x " +
           std::to_string(value_dim_) + (in_chunks_ ? " in chunks" : "");
  }
  bool in_chunks() const override { return in_chunks_; }
  int64_t state_size() const override { return int64_t{value_heads_} * value_dim_ * key_dim_; }
  int64_t out_size() const override { return value_heads_ * value_dim_; }
  std::vector<std::vector<float>*> inputs() override {
    if (fixed_) return {&qkv_, &log_decay_};
    return {&qkv_, &log_decay_, &beta_};
  }
  void run_reference(const Batch& batch, int64_t first, float* states, float* out) const override {
    ThreadPool threads(1);
    if (fixed_) {
      reference::lightning(params<LightningParams>(batch, first, states, out), threads);
    } else {
      reference::kda(kda_params(batch, first, states, out), threads);
    }
  }
  void run(const Batch& batch, int64_t first, float* states, float* out, int team,
           cpu::Isa isa) const override {
    ThreadPool threads(team);
    if (!fixed_) return cpu::kda(kda_params(batch, first, states, out), threads, isa);
    auto lightning = params<LightningParams>(batch, first, states, out);
    lightning.in_chunks = in_chunks_;
    cpu::lightning(lightning, threads, isa);
  }

 private:
  int64_t row() const { return 2 * key_heads_ * key_dim_ + value_heads_ * value_dim_; }

  KdaParams kda_params(const Batch& batch, int64_t first, float* states, float* out) const {
    auto kda = params<KdaParams>(batch, first, states, out);
    kda.log_decay += first * value_heads_ * key_dim_;
    kda.beta = beta_.data() + first * value_heads_;
    kda.l2_normalise_qk = true;
    return kda;
  }

  template <typename Params>
  Params params(const Batch& batch, int64_t first, float* states, float* out) const {
    Params params;
    params.batch = batch.view();
    params.qkv = qkv_.data() + first * row();
    params.log_decay = log_decay_.data();
    params.state = states;
    params.state_slot_stride = state_stride();
    params.out = out;
    params.out_token_stride = out_size();
    params.key_heads = key_heads_;
    params.value_heads = value_heads_;
    params.key_dim = key_dim_;
    params.value_dim = value_dim_;
    params.scale = 0.25f;
    return params;
  }

  bool fixed_, in_chunks_;
  int32_t key_heads_, value_heads_, key_dim_, value_dim_;
  std::vector<float> qkv_, log_decay_, beta_;
};

class Mamba : public Operation {
 public:
  Mamba(int32_t heads, int32_t groups, int32_t head_dim, int32_t state_dim, bool in_chunks = false)
      : in_chunks_(in_chunks),
        heads_(heads),
        groups_(groups),
        head_dim_(head_dim),
        state_dim_(state_dim),
        xbc_(random_values(static_cast<size_t>(kTokens * row()), 11, -1, 1)),
        log_decay_(random_values(static_cast<size_t>(kTokens * heads), 12, -2, 0)),
        dt_(random_values(static_cast<size_t>(kTokens * heads), 13, 0, 1)),
        skip_(random_values(static_cast<size_t>(heads), 14, -1, 1)) {}

  std::string name() const override {
    return "mamba2 " + std::to_string(head_dim_) + " x " + std::to_string(state_dim_) +
           (in_chunks_ ? " in chunks" : "");
  }
  bool in_chunks() const override { return in_chunks_; }
  int64_t state_size() const override { return int64_t{heads_} * head_dim_ * state_dim_; }
  int64_t out_size() const override { return heads_ * head_dim_; }
  std::vector<std::vector<float>*> inputs() override {
    if (groups_ == 1) return {&xbc_, &log_decay_, &dt_};
    return {&xbc_, &log_decay_, &dt_, &skip_};
  }
  void run_reference(const Batch& batch, int64_t first, float* states, float* out) const override {
    ThreadPool threads(1);
    reference::mamba2(params(batch, first, states, out), threads);
  }
  void run(const Batch& batch, int64_t first, float* states, float* out, int team,
           cpu::Isa isa) const override {
    ThreadPool threads(team);
    cpu::mamba2(params(batch, first, states, out), threads, isa);
  }

 private:
  int64_t row() const { return heads_ * head_dim_ + 2 * groups_ * state_dim_; }

  Mamba2Params params(const Batch& batch, int64_t first, float* states, float* out) const {
    Mamba2Params params;
    params.batch = batch.view();
    params.xbc = xbc_.data() + first * row();
    params.log_decay = log_decay_.data() + first * heads_;
    params.dt = dt_.data() + first * heads_;
    params.skip = groups_ == 1 ? nullptr : skip_.data();
    params.state = states;
    params.state_slot_stride = state_stride();
    params.out = out;
    params.out_token_stride = out_size();
    params.heads = heads_;
    params.groups = groups_;
    params.head_dim = head_dim_;
    params.state_dim = state_dim_;
    params.in_chunks = in_chunks_;
    return params;
  }

  bool in_chunks_;
  int32_t heads_, groups_, head_dim_, state_dim_;
  std::vector<float> xbc_, log_decay_, dt_, skip_;
};

class Scan : public Operation {
 public:
  Scan(int32_t channels, int32_t groups, int32_t state_dim)
      : channels_(channels),
        groups_(groups),
        state_dim_(state_dim),
        xbc_(random_values(static_cast<size_t>(kTokens * row()), 18, -1, 1)),
        a_(random_values(static_cast<size_t>(channels * state_dim), 19, -4, 0)),
        dt_(random_values(static_cast<size_t>(kTokens * channels), 20, 0, 1)),
        skip_(random_values(static_cast<size_t>(channels), 21, -1, 1)) {}

  std::string name() const override {
    return "mamba1 " + std::to_string(channels_) + " x " + std::to_string(state_dim_);
  }
  int64_t state_size() const override { return int64_t{channels_} * state_dim_; }
  int64_t out_size() const override { return channels_; }
  std::vector<std::vector<float>*> inputs() override {
    if (groups_ > 1) return {&xbc_, &a_, &dt_};
    return {&xbc_, &a_, &dt_, &skip_};
  }
  void run_reference(const Batch& batch, int64_t first, float* states, float* out) const override {
    ThreadPool threads(1);
    reference::mamba1(params(batch, first, states, out), threads);
  }
  void run(const Batch& batch, int64_t first, float* states, float* out, int team,
           cpu::Isa isa) const override {
    ThreadPool threads(team);
    cpu::mamba1(params(batch, first, states, out), threads, isa);
  }

 private:
  int64_t row() const { return channels_ + 2 * groups_ * state_dim_; }

  Mamba1Params params(const Batch& batch, int64_t first, float* states, float* out) const {
    Mamba1Params params;
    params.batch = batch.view();
    params.xbc = xbc_.data() + first * row();
    params.a = a_.data();
    params.dt = dt_.data() + first * channels_;
    params.skip = groups_ > 1 ? nullptr : skip_.data();
    params.state = states;
    params.state_slot_stride = state_stride();
    params.out = out;
    params.out_token_stride = out_size();
    params.channels = channels_;
    params.groups = groups_;
    params.state_dim = state_dim_;
    return params;
  }

  int32_t channels_, groups_, state_dim_;
  std::vector<float> xbc_, a_, dt_, skip_;
};

inline std::vector<std::unique_ptr<Operation>> operations() {
  std::vector<std::unique_ptr<Operation>> list;
  list.push_back(std::make_unique<Convolution>(200, 4, true));
  list.push_back(std::make_unique<Convolution>(7, 2, false));
  list.push_back(std::make_unique<Convolution>(33, 1, true));
  list.push_back(std::make_unique<Convolution>(64, 9, false));
  list.push_back(std::make_unique<Convolution>(37, 3, true, true));
  list.push_back(std::make_unique<Scan>(67, 1, 16));
  list.push_back(std::make_unique<Scan>(44, 2, 21));
  list.push_back(std::make_unique<DeltaNet>(2, 4, 64, 64));
  list.push_back(std::make_unique<DeltaNet>(1, 3, 37, 13));
  list.push_back(std::make_unique<DeltaNet>(1, 1, 128, 128));
  list.push_back(std::make_unique<Mamba>(4, 2, 32, 48));
  list.push_back(std::make_unique<Mamba>(3, 1, 5, 19));
  list.push_back(std::make_unique<Channelwise>(2, 4, 64, 24, false));
  list.push_back(std::make_unique<Channelwise>(1, 2, 37, 13, false));
  list.push_back(std::make_unique<Channelwise>(2, 2, 48, 64, true));
  // Panels that are full, cut by the end of a head, and cut by the end of a task.
  list.push_back(std::make_unique<DeltaNet>(2, 4, 64, 64, true));
  list.push_back(std::make_unique<DeltaNet>(1, 3, 37, 13, true));
  list.push_back(std::make_unique<DeltaNet>(1, 1, 128, 128, true));
  list.push_back(std::make_unique<DeltaNet>(1, 2, 256, 72, true));
  list.push_back(std::make_unique<Mamba>(4, 2, 32, 48, true));
  list.push_back(std::make_unique<Mamba>(3, 1, 5, 19, true));
  list.push_back(std::make_unique<Channelwise>(1, 3, 24, 20, true, true));
  return list;
}

}  // namespace fovea::kernels
