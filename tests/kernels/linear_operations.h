// SPDX-License-Identifier: Apache-2.0
// The recurrences of linear layers as operations of one interface: random inputs, the oracle and
// the kernels of every instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/linear_attention.h"
#include "kernels/reference/reference.h"
#include "support/random_values.h"

namespace fovea::kernels {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using test::random_values;

struct Request {
  int32_t q_len;
  int32_t cached;  // tokens before the new ones
  int32_t slot;
};

// A batch over a pool of seven slots.
struct Batch {
  std::vector<Request> requests;
  std::vector<int32_t> q_indptr, kv_lens, slots;

  explicit Batch(std::vector<Request> list) : requests(std::move(list)), q_indptr{0} {
    for (const Request& request : requests) {
      q_indptr.push_back(q_indptr.back() + request.q_len);
      kv_lens.push_back(request.cached + request.q_len);
      slots.push_back(request.slot);
    }
  }
  int32_t tokens() const { return q_indptr.back(); }
  StateBatch view() const {
    return {static_cast<int32_t>(requests.size()), q_indptr.data(), kv_lens.data(), slots.data()};
  }
};

inline constexpr int32_t kSlots = 7;

// New and continued requests, a request without tokens, padding, and slots without a request.
inline Batch mixed_batch() {
  return Batch({{90, 0, 3}, {1, 9, 1}, {0, 5, 5}, {3, 0, -1}, {67, 2, 6}, {1, 0, 2}});
}

// The states of new requests and of unused slots are NaN: the operations must not read them.
inline std::vector<float> make_states(const Batch& batch, int64_t size, int64_t stride) {
  std::vector<float> states = random_values(static_cast<size_t>(kSlots * stride), 3, -1, 1);
  for (int32_t slot = 0; slot < kSlots; ++slot) {
    const auto continued = std::find_if(
        batch.requests.begin(), batch.requests.end(),
        [&](const Request& request) { return request.slot == slot && request.cached > 0; });
    float* state = states.data() + slot * stride;
    if (continued == batch.requests.end()) std::fill_n(state, size, kNan);
    std::fill(state + size, state + stride, kNan);
  }
  return states;
}

// One operation under test. Computes tokens [begin, end) of request `index` of the batch, or the
// whole batch, from given states.
class Operation {
 public:
  virtual ~Operation() = default;
  virtual std::string name() const = 0;
  virtual int64_t state_size() const = 0;
  virtual int64_t out_size() const = 0;
  virtual std::vector<std::vector<float>*> inputs() = 0;
  // True if the cuts of a prompt change last bits.
  virtual bool in_chunks() const { return false; }
  // `first` is the row of the inputs at which the batch begins.
  virtual void run_reference(const Batch& batch, int64_t first, float* states,
                             float* out) const = 0;
  virtual void run(const Batch& batch, int64_t first, float* states, float* out, int team,
                   cpu::Isa isa) const = 0;

  int64_t state_stride() const { return state_size() + 11; }

 protected:
  static constexpr int32_t kTokens = 200;
};

class Convolution : public Operation {
 public:
  Convolution(int32_t dim, int32_t width, bool has_bias)
      : dim_(dim),
        width_(width),
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
    params.y = out;
    params.dim = dim_;
    params.width = width_;
    return params;
  }

  int32_t dim_, width_;
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

inline std::vector<std::unique_ptr<Operation>> operations() {
  std::vector<std::unique_ptr<Operation>> list;
  list.push_back(std::make_unique<Convolution>(200, 4, true));
  list.push_back(std::make_unique<Convolution>(7, 2, false));
  list.push_back(std::make_unique<Convolution>(33, 1, true));
  list.push_back(std::make_unique<Convolution>(64, 9, false));
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
