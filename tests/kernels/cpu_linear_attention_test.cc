// SPDX-License-Identifier: Apache-2.0
// The fast recurrences against fp64, and bit for bit against themselves: in chunks, token by token,
// alone, and with several threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/cpu.h"
#include "kernels/linear_attention.h"
#include "kernels/reference/reference.h"
#include "support/expect_close.h"
#include "support/isas.h"
#include "support/random_values.h"

namespace fovea::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

using test::isas;
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

constexpr int32_t kSlots = 7;

// New and continued requests, a request without tokens, padding, and slots without a request.
Batch mixed_batch() {
  return Batch({{40, 0, 3}, {1, 9, 1}, {0, 5, 5}, {3, 0, -1}, {67, 2, 6}, {1, 0, 2}});
}

// The states of new requests and of unused slots are NaN: the operations must not read them.
std::vector<float> make_states(const Batch& batch, int64_t size, int64_t stride) {
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

struct Result {
  std::vector<float> out;     // [tokens, ...]
  std::vector<float> states;  // [slots, ...]
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_close(const std::vector<float>& actual, const std::vector<float>& expected,
                  double error, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(test::is_near(actual[i], expected[i], error * (1 + std::fabs(expected[i]))))
        << what << " at " << i;
  }
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
  DeltaNet(int32_t key_heads, int32_t value_heads, int32_t key_dim, int32_t value_dim)
      : key_heads_(key_heads),
        value_heads_(value_heads),
        key_dim_(key_dim),
        value_dim_(value_dim),
        qkv_(random_values(static_cast<size_t>(kTokens * row()), 8, -1, 1)),
        log_decay_(random_values(static_cast<size_t>(kTokens * value_heads), 9, -2, 0)),
        beta_(random_values(static_cast<size_t>(kTokens * value_heads), 10, 0, 1)) {}

  std::string name() const override {
    return "delta net " + std::to_string(key_dim_) + " x " + std::to_string(value_dim_);
  }
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
    return params;
  }

  int32_t key_heads_, value_heads_, key_dim_, value_dim_;
  std::vector<float> qkv_, log_decay_, beta_;
};

class Mamba : public Operation {
 public:
  Mamba(int32_t heads, int32_t groups, int32_t head_dim, int32_t state_dim)
      : heads_(heads),
        groups_(groups),
        head_dim_(head_dim),
        state_dim_(state_dim),
        xbc_(random_values(static_cast<size_t>(kTokens * row()), 11, -1, 1)),
        log_decay_(random_values(static_cast<size_t>(kTokens * heads), 12, -2, 0)),
        dt_(random_values(static_cast<size_t>(kTokens * heads), 13, 0, 1)),
        skip_(random_values(static_cast<size_t>(heads), 14, -1, 1)) {}

  std::string name() const override {
    return "mamba2 " + std::to_string(head_dim_) + " x " + std::to_string(state_dim_);
  }
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
    return params;
  }

  int32_t heads_, groups_, head_dim_, state_dim_;
  std::vector<float> xbc_, log_decay_, dt_, skip_;
};

std::vector<std::unique_ptr<Operation>> operations() {
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
  return list;
}

Result run_batch(const Operation& operation, const Batch& batch, int team, cpu::Isa isa) {
  Result result;
  result.states = make_states(batch, operation.state_size(), operation.state_stride());
  result.out.assign(static_cast<size_t>(batch.tokens() * operation.out_size()), kNan);
  operation.run(batch, 0, result.states.data(), result.out.data(), team, isa);
  return result;
}

TEST(CpuLinearAttention, MatchesReference) {
  const Batch batch = mixed_batch();
  for (const auto& operation : operations()) {
    Result expected;
    expected.states = make_states(batch, operation->state_size(), operation->state_stride());
    expected.out.assign(static_cast<size_t>(batch.tokens() * operation->out_size()), kNan);
    operation->run_reference(batch, 0, expected.states.data(), expected.out.data());
    for (const cpu::Isa isa : isas()) {
      const Result actual = run_batch(*operation, batch, 2, isa);
      const std::string what = operation->name() + " on " + std::string(cpu::isa_name(isa));
      // f32 sums over up to 128 keys, and a state that carries earlier roundings forward.
      expect_close(actual.out, expected.out, 4e-6, what);
      expect_close(actual.states, expected.states, 4e-6, what + ", state");
    }
  }
}

// A NaN of any bits in any input gives NaN where the reference has NaN, and nowhere else.
TEST(CpuLinearAttention, NanStaysNan) {
  constexpr uint32_t kNans[] = {0x7fc00000, 0xffffffff, 0x7f800001};
  const Batch batch = mixed_batch();
  size_t nan = 0;
  for (const auto& operation : operations()) {
    for (std::vector<float>* input : operation->inputs()) {
      for (const size_t at : {size_t{0}, input->size() / 3}) {
        if (at >= input->size()) continue;
        const float old = (*input)[at];
        (*input)[at] = std::bit_cast<float>(kNans[nan++ % std::size(kNans)]);
        Result expected;
        expected.states = make_states(batch, operation->state_size(), operation->state_stride());
        expected.out.assign(static_cast<size_t>(batch.tokens() * operation->out_size()), kNan);
        operation->run_reference(batch, 0, expected.states.data(), expected.out.data());
        const auto own = expected.out.begin() + batch.requests[0].q_len * operation->out_size();
        if (at == 0) {
          EXPECT_TRUE(
              std::any_of(expected.out.begin(), own, [](float x) { return std::isnan(x); }));
        }
        for (const cpu::Isa isa : isas()) {
          const Result actual = run_batch(*operation, batch, 2, isa);
          const std::string what = operation->name() + " on " + std::string(cpu::isa_name(isa));
          expect_close(actual.out, expected.out, 4e-6, what);
          expect_close(actual.states, expected.states, 4e-6, what + ", state");
        }
        (*input)[at] = old;
      }
    }
  }
}

TEST(CpuLinearAttention, ThreadsDoNotChangeBits) {
  const Batch batch = mixed_batch();
  for (const auto& operation : operations()) {
    for (const cpu::Isa isa : isas()) {
      const Result one = run_batch(*operation, batch, 1, isa);
      const Result five = run_batch(*operation, batch, 5, isa);
      EXPECT_TRUE(same_bits(one.out, five.out)) << operation->name();
      EXPECT_TRUE(same_bits(one.states, five.states)) << operation->name();
    }
  }
}

// A prompt in pieces of any size gives the outputs and the state of the whole prompt.
TEST(CpuLinearAttention, ChunkingDoesNotChangeBits) {
  constexpr int32_t kPrompt = 75;
  for (const auto& operation : operations()) {
    for (const cpu::Isa isa : isas()) {
      const Result whole = run_batch(*operation, Batch({{kPrompt, 0, 4}}), 1, isa);
      for (const int32_t chunk : {1, 2, 31, 32, 64}) {
        Result pieces;
        pieces.states = make_states(Batch({}), operation->state_size(), operation->state_stride());
        pieces.out.assign(whole.out.size(), kNan);
        for (int32_t begin = 0; begin < kPrompt; begin += chunk) {
          const Batch piece({{std::min(chunk, kPrompt - begin), begin, 4}});
          operation->run(piece, begin, pieces.states.data(),
                         pieces.out.data() + begin * operation->out_size(), 2, isa);
        }
        EXPECT_TRUE(same_bits(whole.out, pieces.out)) << operation->name() << " by " << chunk;
        EXPECT_TRUE(same_bits(whole.states, pieces.states)) << operation->name() << " by " << chunk;
      }
    }
  }
}

// Every request of a batch gives the results that it gives alone.
TEST(CpuLinearAttention, OtherRequestsDoNotChangeBits) {
  const Batch batch = mixed_batch();
  for (const auto& operation : operations()) {
    const Result together = run_batch(*operation, batch, 2, cpu::best_isa());
    std::vector<float> states =
        make_states(batch, operation->state_size(), operation->state_stride());
    std::vector<float> out(together.out.size(), kNan);
    for (size_t i = 0; i < batch.requests.size(); ++i) {
      const int64_t first = batch.q_indptr[i];
      operation->run(Batch({batch.requests[i]}), first, states.data(),
                     out.data() + first * operation->out_size(), 1, cpu::best_isa());
    }
    EXPECT_TRUE(same_bits(together.out, out)) << operation->name();
    EXPECT_TRUE(same_bits(together.states, states)) << operation->name();
  }
}

TEST(CpuLinearAttention, NoRequestsIsNoWork) {
  const Batch empty({});
  for (const auto& operation : operations()) {
    operation->run(empty, 0, nullptr, nullptr, 2, cpu::best_isa());
  }
}

}  // namespace
}  // namespace fovea::kernels
