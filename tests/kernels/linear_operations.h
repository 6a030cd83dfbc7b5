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

// An operation by its two kernels. Subclasses give sizes and inputs.
template <typename Params, auto kReference, auto kKernel>
class KernelOperation : public Operation {
 public:
  void run_reference(const Batch& batch, int64_t first, float* states, float* out) const override {
    ThreadPool threads(1);
    kReference(params(batch, first, states, out), threads);
  }
  void run(const Batch& batch, int64_t first, float* states, float* out, int team,
           cpu::Isa isa) const override {
    ThreadPool threads(team);
    kKernel(params(batch, first, states, out), threads, isa);
  }

 protected:
  // Sizes, and inputs from row `first` on.
  virtual Params inputs_from(int64_t first) const = 0;

 private:
  Params params(const Batch& batch, int64_t first, float* states, float* out) const {
    Params params = inputs_from(first);
    params.batch = batch.view();
    params.state = states;
    params.state_slot_stride = state_stride();
    if constexpr (requires { params.y; }) {
      params.y = out;
      params.y_token_stride = out_size();
    } else {
      params.out = out;
      params.out_token_stride = out_size();
    }
    return params;
  }
};

inline void reference_conv(const CausalConvParams& params, ThreadPool&) {
  reference::causal_conv(params);
}

class Convolution : public KernelOperation<CausalConvParams, reference_conv, cpu::causal_conv> {
 public:
  Convolution(int32_t dim, int32_t width, bool has_bias, bool plain = false)
      : dim_(dim),
        width_(width),
        plain_(plain),
        x_(random_rows(kTokens, dim, 5, -3, 3)),
        weight_(random_rows(dim, width, 6, -1, 1)),
        bias_(random_rows(has_bias ? 1 : 0, dim, 7, -1, 1)) {}

  std::string name() const override {
    return "conv " + std::to_string(dim_) + " width " + std::to_string(width_);
  }
  int64_t state_size() const override { return int64_t{dim_} * (width_ - 1); }
  int64_t out_size() const override { return dim_; }
  std::vector<std::vector<float>*> inputs() override { return {&x_, &weight_, &bias_}; }

 private:
  CausalConvParams inputs_from(int64_t first) const override {
    CausalConvParams params;
    params.x = x_.data() + first * dim_;
    params.weight = weight_.data();
    params.bias = bias_.empty() ? nullptr : bias_.data();
    params.plain = plain_;
    params.dim = dim_;
    params.width = width_;
    return params;
  }

  int32_t dim_, width_;
  bool plain_;
  std::vector<float> x_, weight_, bias_;
};

struct HeadSizes {
  int32_t key_heads, value_heads, key_dim, value_dim;
};

// Recurrences whose heads have a state of key_dim x value_dim.
template <typename Params, auto kReference, auto kKernel>
class HeadStates : public KernelOperation<Params, kReference, kKernel> {
 public:
  HeadStates(const char* kind, const HeadSizes& sizes, unsigned seed)
      : kind_(kind),
        sizes_(sizes),
        qkv_(Operation::random_rows(Operation::kTokens, row(), seed, -1, 1)) {}

  std::string name() const override {
    return kind_ + " " + std::to_string(sizes_.key_dim) + " x " + std::to_string(sizes_.value_dim) +
           (this->in_chunks() ? " in chunks" : "");
  }
  int64_t state_size() const override { return out_size() * sizes_.key_dim; }
  int64_t out_size() const override { return int64_t{sizes_.value_heads} * sizes_.value_dim; }

 protected:
  Params inputs_from(int64_t first) const override {
    Params params;
    params.qkv = qkv_.data() + first * row();
    params.key_heads = sizes_.key_heads;
    params.value_heads = sizes_.value_heads;
    params.key_dim = sizes_.key_dim;
    params.value_dim = sizes_.value_dim;
    params.scale = 0.25f;
    return params;
  }
  std::vector<float>& qkv() { return qkv_; }

 private:
  int64_t row() const { return int64_t{2} * sizes_.key_heads * sizes_.key_dim + out_size(); }

  std::string kind_;
  HeadSizes sizes_;
  std::vector<float> qkv_;
};

class DeltaNet
    : public HeadStates<GatedDeltaNetParams, reference::gated_delta_net, cpu::gated_delta_net> {
 public:
  explicit DeltaNet(const HeadSizes& sizes, bool in_chunks = false)
      : HeadStates("delta net", sizes, 8),
        in_chunks_(in_chunks),
        value_heads_(sizes.value_heads),
        log_decay_(random_rows(kTokens, value_heads_, 9, -2, 0)),
        beta_(random_rows(kTokens, value_heads_, 10, 0, 1)) {}

  bool in_chunks() const override { return in_chunks_; }
  std::vector<std::vector<float>*> inputs() override { return {&qkv(), &log_decay_, &beta_}; }

 private:
  GatedDeltaNetParams inputs_from(int64_t first) const override {
    GatedDeltaNetParams params = HeadStates::inputs_from(first);
    params.log_decay = log_decay_.data() + first * value_heads_;
    params.beta = beta_.data() + first * value_heads_;
    params.l2_normalise_qk = true;
    params.in_chunks = in_chunks_;
    return params;
  }

  bool in_chunks_;
  int32_t value_heads_;
  std::vector<float> log_decay_, beta_;
};

class Kda : public HeadStates<KdaParams, reference::kda, cpu::kda> {
 public:
  explicit Kda(const HeadSizes& sizes)
      : HeadStates("kda", sizes, 15),
        value_heads_(sizes.value_heads),
        decays_(value_heads_ * sizes.key_dim),
        log_decay_(random_rows(kTokens, decays_, 16, -2, 0)),
        beta_(random_rows(kTokens, value_heads_, 17, 0, 1)) {}

  std::vector<std::vector<float>*> inputs() override { return {&qkv(), &log_decay_, &beta_}; }

 private:
  KdaParams inputs_from(int64_t first) const override {
    KdaParams params = HeadStates::inputs_from(first);
    params.log_decay = log_decay_.data() + first * decays_;
    params.beta = beta_.data() + first * value_heads_;
    params.l2_normalise_qk = true;
    return params;
  }

  int32_t value_heads_, decays_;
  std::vector<float> log_decay_, beta_;
};

class Lightning : public HeadStates<LightningParams, reference::lightning, cpu::lightning> {
 public:
  explicit Lightning(const HeadSizes& sizes, bool in_chunks = false)
      : HeadStates("lightning", sizes, 15),
        in_chunks_(in_chunks),
        log_decay_(random_rows(1, sizes.value_heads, 16, -2, -0.05f)) {}

  bool in_chunks() const override { return in_chunks_; }
  std::vector<std::vector<float>*> inputs() override { return {&qkv(), &log_decay_}; }

 private:
  LightningParams inputs_from(int64_t first) const override {
    LightningParams params = HeadStates::inputs_from(first);
    params.log_decay = log_decay_.data();
    params.in_chunks = in_chunks_;
    return params;
  }

  bool in_chunks_;
  std::vector<float> log_decay_;
};

// Has no skip connection with one group.
class Mamba2 : public KernelOperation<Mamba2Params, reference::mamba2, cpu::mamba2> {
 public:
  Mamba2(int32_t heads, int32_t groups, int32_t head_dim, int32_t state_dim, bool in_chunks = false)
      : in_chunks_(in_chunks),
        heads_(heads),
        groups_(groups),
        head_dim_(head_dim),
        state_dim_(state_dim),
        xbc_(random_rows(kTokens, row(), 11, -1, 1)),
        log_decay_(random_rows(kTokens, heads, 12, -2, 0)),
        dt_(random_rows(kTokens, heads, 13, 0, 1)),
        skip_(random_rows(groups == 1 ? 0 : 1, heads, 14, -1, 1)) {}

  std::string name() const override {
    return "mamba2 " + std::to_string(head_dim_) + " x " + std::to_string(state_dim_) +
           (in_chunks_ ? " in chunks" : "");
  }
  bool in_chunks() const override { return in_chunks_; }
  int64_t state_size() const override { return int64_t{heads_} * head_dim_ * state_dim_; }
  int64_t out_size() const override { return int64_t{heads_} * head_dim_; }
  std::vector<std::vector<float>*> inputs() override { return {&xbc_, &log_decay_, &dt_, &skip_}; }

 private:
  int64_t row() const { return out_size() + int64_t{2} * groups_ * state_dim_; }

  Mamba2Params inputs_from(int64_t first) const override {
    Mamba2Params params;
    params.xbc = xbc_.data() + first * row();
    params.log_decay = log_decay_.data() + first * heads_;
    params.dt = dt_.data() + first * heads_;
    params.skip = skip_.empty() ? nullptr : skip_.data();
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

// Has no skip connection with several groups.
class Mamba1 : public KernelOperation<Mamba1Params, reference::mamba1, cpu::mamba1> {
 public:
  Mamba1(int32_t channels, int32_t groups, int32_t state_dim)
      : channels_(channels),
        groups_(groups),
        state_dim_(state_dim),
        xbc_(random_rows(kTokens, row(), 18, -1, 1)),
        a_(random_rows(channels, state_dim, 19, -4, 0)),
        dt_(random_rows(kTokens, channels, 20, 0, 1)),
        skip_(random_rows(groups > 1 ? 0 : 1, channels, 21, -1, 1)) {}

  std::string name() const override {
    return "mamba1 " + std::to_string(channels_) + " x " + std::to_string(state_dim_);
  }
  int64_t state_size() const override { return int64_t{channels_} * state_dim_; }
  int64_t out_size() const override { return channels_; }
  std::vector<std::vector<float>*> inputs() override { return {&xbc_, &a_, &dt_, &skip_}; }

 private:
  int64_t row() const { return channels_ + int64_t{2} * groups_ * state_dim_; }

  Mamba1Params inputs_from(int64_t first) const override {
    Mamba1Params params;
    params.xbc = xbc_.data() + first * row();
    params.a = a_.data();
    params.dt = dt_.data() + first * channels_;
    params.skip = skip_.empty() ? nullptr : skip_.data();
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
  list.push_back(std::make_unique<Mamba1>(67, 1, 16));
  list.push_back(std::make_unique<Mamba1>(44, 2, 21));
  list.push_back(std::make_unique<DeltaNet>(HeadSizes{2, 4, 64, 64}));
  list.push_back(std::make_unique<DeltaNet>(HeadSizes{1, 3, 37, 13}));
  list.push_back(std::make_unique<DeltaNet>(HeadSizes{1, 1, 128, 128}));
  list.push_back(std::make_unique<Mamba2>(4, 2, 32, 48));
  list.push_back(std::make_unique<Mamba2>(3, 1, 5, 19));
  list.push_back(std::make_unique<Kda>(HeadSizes{2, 4, 64, 24}));
  list.push_back(std::make_unique<Kda>(HeadSizes{1, 2, 37, 13}));
  list.push_back(std::make_unique<Lightning>(HeadSizes{2, 2, 48, 64}));
  // Panels that are full, cut by the end of a head, and cut by the end of a task.
  list.push_back(std::make_unique<DeltaNet>(HeadSizes{2, 4, 64, 64}, true));
  list.push_back(std::make_unique<DeltaNet>(HeadSizes{1, 3, 37, 13}, true));
  list.push_back(std::make_unique<DeltaNet>(HeadSizes{1, 1, 128, 128}, true));
  list.push_back(std::make_unique<DeltaNet>(HeadSizes{1, 2, 256, 72}, true));
  list.push_back(std::make_unique<Mamba2>(4, 2, 32, 48, true));
  list.push_back(std::make_unique<Mamba2>(3, 1, 5, 19, true));
  list.push_back(std::make_unique<Lightning>(HeadSizes{1, 3, 24, 20}, true));
  return list;
}

}  // namespace fovea::kernels
