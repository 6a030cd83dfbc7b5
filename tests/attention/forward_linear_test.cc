// SPDX-License-Identifier: Apache-2.0
// Errors of forward() of linear layers.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "fovea/select_backend.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();
constexpr LinearSpec kLinear{
    .key_heads = 1, .value_heads = 1, .key_dim = 4, .value_dim = 4, .conv_width = 2};

AttentionSpec spec_of(AttentionKind kind) {
  AttentionSpec spec{.kind = kind, .linear = kLinear};
  if (convolves_alone(kind)) spec.linear.value_heads = 4, spec.linear.value_dim = 1;
  if (kind == AttentionKind::short_conv) spec.linear.key_heads = spec.linear.key_dim = 0;
  return spec;
}

StateCacheSpec states_of(const AttentionSpec& spec) {
  StateCacheSpec states{.layers = 1, .conv_dim = conv_dim_of(spec), .conv_width = 2};
  if (spec.kind == AttentionKind::short_conv) return states;
  states.heads = spec.linear.value_heads;
  states.rows = spec.linear.value_dim;
  states.columns = spec.linear.key_dim;
  return states;
}

// Two tokens of a request, planned, and tensors that fit. mamba1: those of the scan.
struct TwoTokens {
  explicit TwoTokens(AttentionKind kind) : pool(make_state_pool(states_of(spec_of(kind)), 2)) {
    const BackendRegistry registry = BackendRegistry::builtin();
    const AttentionSpec spec = spec_of(kind);
    backend =
        registry.find("linear")->create({.spec = spec, .state = pool.get(), .threads = &threads});
    backend->reserve({.max_requests = 1, .max_tokens = 2, .max_q_len = 2, .max_kv_len = 2});
    BatchView batch{.mode = ForwardMode::extend, .requests = 1, .tokens = 2, .q_indptr = q_indptr};
    batch.kv_lens = kv_lens;
    batch.linear.state_slots = slots;
    backend->plan(batch);
    const LinearSpec& linear = spec.linear;
    good.out = dense_rows(values.data(), DType::f32, linear.value_heads, linear.value_dim);
    good.linear.mixed = values.data();
    if (kind != AttentionKind::mamba1) good.linear.conv_weight = values.data();
    if (kind != AttentionKind::short_conv) {
      good.linear.log_decay = values.data();
      if (kind != AttentionKind::lightning) good.linear.beta = values.data();
    }
    backend->forward(good);
  }

  void expect_refused(const char* words, const std::function<void(LayerTensors&)>& change) {
    LayerTensors layer = good;
    change(layer);
    expect_invalid(words, [&] { backend->forward(layer); });
  }

  const int32_t q_indptr[2] = {0, 2}, kv_lens[1] = {2}, slots[1] = {1};
  std::vector<float> values = std::vector<float>(32);
  ThreadPool threads = ThreadPool(1);
  std::unique_ptr<StatePool> pool;
  std::unique_ptr<AttentionBackend> backend;
  LayerTensors good;
};

// Moves a pointer by one byte.
void step(const float*& array) {
  array = reinterpret_cast<const float*>(reinterpret_cast<const char*>(array) + 1);
}

TEST(ForwardLinear, RefusesTensorsThatDoNotFit) {
  TwoTokens two(AttentionKind::gated_delta_net);
  const std::pair<const char*, std::function<void(LayerTensors&)>> wrong[] = {
      {"linear.mixed is null", [](auto& t) { t.linear.mixed = nullptr; }},
      {"linear.log_decay is null", [](auto& t) { t.linear.log_decay = nullptr; }},
      {"linear.beta is null", [](auto& t) { t.linear.beta = nullptr; }},
      {"linear.conv_weight is null, but the spec's linear.conv_width is 2",
       [](auto& t) { t.linear.conv_weight = nullptr; }},
      {"linear.skip is given, but the spec's kind is gated_delta_net",
       [&](auto& t) { t.linear.skip = two.values.data(); }},
      {"out is null", [](auto& t) { t.out.data = nullptr; }},
      {"out is bf16", [](auto& t) { t.out.dtype = DType::bf16; }},
      {"out is fp32 with a head stride of 5, must be f32 with a head stride of value_dim = 4",
       [](auto& t) { t.out.head_stride = 5; }},
      {"out has strides of 3 a token and 4 a head: rows of 4 values overlap",
       [](auto& t) { t.out.token_stride = 3; }},
      {"q is given, but the spec's kind", [](auto& t) { t.q = t.out; }},
      {"mla.q_rope is given, but the spec's kind", [](auto& t) { t.mla.q_rope = t.out; }},
      {"dual_chunk.q_succ is given, but the spec's kind",
       [](auto& t) { t.dual_chunk.q_succ = t.out; }},
      {"dual_chunk.q_inter is given, but the spec's kind",
       [](auto& t) { t.dual_chunk.q_inter = t.out; }},
      {"k is given, but the spec's kind", [](auto& t) { t.k = t.out; }},
      {"v is given, but the spec's kind", [](auto& t) { t.v = t.out; }},
      {"lse is given, but the spec's kind",
       [&](auto& t) { t.lse = NaturalLse(two.values.data()); }},
      {"linear.mixed is at", [](auto& t) { step(t.linear.mixed); }},
      {"linear.beta is at", [](auto& t) { step(t.linear.beta); }},
      {"out at", [](auto& t) { t.out.token_stride = kFar; }},
  };
  for (const auto& [words, change] : wrong) two.expect_refused(words, change);
}

TEST(ForwardLinear, RefusesGatesThatAKindDoesNotTake) {
  TwoTokens lightning(AttentionKind::lightning), mamba2(AttentionKind::mamba2);
  TwoTokens kda(AttentionKind::kda);
  const auto normalise = [](LayerTensors& t) { t.linear.l2_normalise_qk = true; };
  const auto skip = [](LayerTensors& t) { t.linear.skip = t.linear.mixed; };
  lightning.expect_refused("linear.beta is given, but the spec's kind is lightning",
                           [](auto& t) { t.linear.beta = t.linear.mixed; });
  lightning.expect_refused("linear.log_decay is null",
                           [](auto& t) { t.linear.log_decay = nullptr; });
  lightning.expect_refused("linear.skip is given, but the spec's kind is lightning", skip);
  lightning.expect_refused("linear.l2_normalise_qk is given, but the spec's kind is lightning",
                           normalise);
  mamba2.expect_refused("linear.l2_normalise_qk is given, but the spec's kind is mamba2",
                        normalise);
  kda.expect_refused("linear.beta is null", [](auto& t) { t.linear.beta = nullptr; });
  kda.expect_refused("linear.skip is given, but the spec's kind is kda", skip);
}

TEST(ForwardLinear, RefusesGatesNextToAConvolutionAlone) {
  TwoTokens mamba1(AttentionKind::mamba1), conv(AttentionKind::short_conv);
  TwoTokens mamba2(AttentionKind::mamba2);
  const auto convolve = [](LayerTensors& t) { t.linear.conv_weight = t.linear.mixed; };
  mamba1.expect_refused("linear.log_decay is given, but the call has linear.conv_weight", convolve);
  mamba1.expect_refused("linear.beta is given, but the call has linear.conv_weight", [&](auto& t) {
    convolve(t);
    t.linear.log_decay = nullptr;
  });
  mamba1.expect_refused("linear.skip is given, but the call has linear.conv_weight", [&](auto& t) {
    convolve(t);
    t.linear.skip = t.linear.beta;
    t.linear.log_decay = t.linear.beta = nullptr;
  });
  mamba1.expect_refused("linear.log_decay is null", [](auto& t) { t.linear.log_decay = nullptr; });
  mamba1.expect_refused("linear.beta is null", [](auto& t) { t.linear.beta = nullptr; });
  mamba1.expect_refused("linear.plain_conv is given, but the spec's kind is mamba1", [&](auto& t) {
    convolve(t);
    t.linear.plain_conv = true;
  });
  mamba2.expect_refused("linear.plain_conv is given, but the spec's kind is mamba2",
                        [](auto& t) { t.linear.plain_conv = true; });
  conv.expect_refused("linear.conv_weight is null, but the spec's linear.conv_width is 2",
                      [](auto& t) { t.linear.conv_weight = nullptr; });
  conv.expect_refused("linear.log_decay is given, but the call has linear.conv_weight",
                      [](auto& t) { t.linear.log_decay = t.linear.mixed; });
  conv.expect_refused("linear.skip is given, but the spec's kind is short_conv",
                      [](auto& t) { t.linear.skip = t.linear.mixed; });
}

}  // namespace
}  // namespace fovea
