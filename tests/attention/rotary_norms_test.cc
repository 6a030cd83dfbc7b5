// SPDX-License-Identifier: Apache-2.0
// Norms of heads before their rotation: forward() gives what it gives for heads that were normed
// before, and refuses norms where there is no rotation.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "attention/two_requests.h"

namespace fovea {
namespace {

using test::expect_invalid;
using Fixture = test::TwoRequests;

constexpr int32_t kTokens = 5, kDim = 8, kQueryHeads = 2, kPositions = 16;

std::vector<float> noise(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Returns the heads, normed in fp64.
std::vector<float> normed(std::vector<float> heads, const HeadNorm& norm) {
  for (size_t head = 0; norm.weight != nullptr && head < heads.size(); head += kDim) {
    double squares = 0;
    for (size_t i = head; i < head + kDim; ++i) squares += double{heads[i]} * heads[i];
    const double factor = 1 / std::sqrt(squares / kDim + norm.epsilon);
    for (size_t i = head; i < head + kDim; ++i) {
      const double weight = double{norm.weight[i - head]} + (norm.plus_one ? 1 : 0);
      heads[i] = static_cast<float>(heads[i] * factor * weight);
    }
  }
  return heads;
}

class RotaryNorms : public ::testing::Test {
 protected:
  RotaryNorms() {
    fixture_.spec.has_rope = true;
    fixture_.pool = make_kv_pool(fixture_.cache, test::kPages);
    for (int32_t i = 0; i < kPositions * kDim / 2; ++i) {
      cos_.push_back(std::cos(static_cast<float>(i)));
      sin_.push_back(std::sin(static_cast<float>(i)));
    }
    rotary_ = {.cos = cos_.data(),
               .sin = sin_.data(),
               .max_positions = kPositions,
               .rotary_dim = 6,
               .positions = fixture_.positions.data()};
  }

  // Returns `out`, then q as it was rotated, then the cached keys.
  std::vector<float> run(const BackendEntry& entry, std::vector<float> q, std::vector<float> k,
                         const RotaryTensors& rotary) {
    fixture_.backend =
        entry.create({fixture_.spec, fixture_.pool.get(), nullptr, &fixture_.threads});
    fixture_.backend->reserve(fixture_.limits);
    fixture_.backend->plan(fixture_.batch);
    std::vector<float> v = noise(kTokens * kDim, 3), out(kTokens * kQueryHeads * kDim);
    LayerTensors layer{.q = dense_rows(q.data(), DType::f32, kQueryHeads, kDim),
                       .k = dense_rows(k.data(), DType::f32, 1, kDim),
                       .v = dense_rows(v.data(), DType::f32, 1, kDim),
                       .out = dense_rows(out.data(), DType::f32, kQueryHeads, kDim)};
    layer.rotary = rotary;
    fixture_.backend->forward(layer);
    out.insert(out.end(), q.begin(), q.end());
    const auto* const keys = reinterpret_cast<const float*>(fixture_.pool->layer(0).k);
    for (const int64_t slot : fixture_.out_slots) {
      out.insert(out.end(), keys + slot * kDim, keys + (slot + 1) * kDim);
    }
    return out;
  }

  Fixture fixture_;
  std::vector<float> cos_, sin_;
  RotaryTensors rotary_;
};

TEST_F(RotaryNorms, AreThoseOfHeadsNormedBefore) {
  const std::vector<float> q = noise(kTokens * kQueryHeads * kDim, 1), k = noise(kTokens * kDim, 2);
  const std::vector<float> q_weight = noise(kDim, 4), k_weight = noise(kDim, 5);
  int served = 0;
  for (const BackendEntry& entry : builtin_backends()) {
    const BackendRequest request{
        .spec = fixture_.spec, .cache = fixture_.cache, .limits = fixture_.limits};
    if (!entry.reject(request).empty()) continue;
    ++served;
    for (const bool interleaved : {false, true}) {
      for (const bool norms_k : {false, true}) {
        SCOPED_TRACE(entry.name + (interleaved ? ", interleaved" : "") +
                     (norms_k ? ", both" : ", q alone"));
        RotaryTensors rotary = rotary_;
        rotary.interleaved = interleaved;
        RotaryTensors with = rotary;
        with.q_norm = {q_weight.data(), 1e-3f, false};
        if (norms_k) with.k_norm = {k_weight.data(), 1e-2f, true};
        const std::vector<float> got = run(entry, q, k, with);
        const std::vector<float> want =
            run(entry, normed(q, with.q_norm), normed(k, with.k_norm), rotary);
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5) << i;
      }
    }
  }
  EXPECT_GE(served, 2);
}

TEST_F(RotaryNorms, NeedARotationAndSoundNumbers) {
  const std::vector<float> q = noise(kTokens * kQueryHeads * kDim, 1), k = noise(kTokens * kDim, 2);
  const std::vector<float> weight = noise(kDim + 1, 4);
  const auto refused = [&](const char* words, const HeadNorm& norm) {
    RotaryTensors rotary = fixture_.spec.has_rope ? rotary_ : RotaryTensors{};
    rotary.k_norm = norm;
    expect_invalid(words, [&] { run(reference_backend(), q, k, rotary); });
  };
  refused("rotary.k_norm.epsilon is -1", {weight.data(), -1, false});
  refused("rotary.k_norm.epsilon is nan", {weight.data(), NAN, false});
  const auto* const odd =
      reinterpret_cast<const float*>(reinterpret_cast<const char*>(weight.data()) + 1);
  refused("rotary.k_norm.weight is at", {odd, 0, false});
  fixture_.spec.has_rope = false;
  refused("rotary.k_norm is given, but the spec has has_rope false, kind mha",
          {weight.data(), 0, false});
}

}  // namespace
}  // namespace fovea
