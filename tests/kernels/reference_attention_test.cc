// SPDX-License-Identifier: Apache-2.0
// Inputs that no backend passes to the reference. The contract tests cover the rest: they run the
// reference on every case.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/reference/reference.h"

namespace fovea {
namespace {

// More new tokens than keys: the first rows see nothing.
TEST(ReferenceAttentionEdges, QueriesBeforeTheFirstKeyAreEmpty) {
  ThreadPool threads(1);
  float q[3] = {1, 1, 1}, k[2] = {0.5f, 1}, v[2] = {3, 5}, out[3], lse[3];
  const int32_t q_indptr[2] = {0, 3}, kv_indptr[2] = {0, 2}, kv_lens[1] = {2};
  kernels::AttentionParams params;
  params.q = dense_rows(q, DType::f32, 1, 1);
  params.keys.k = dense_rows(k, DType::f32, 1, 1);
  params.keys.v = dense_rows(v, DType::f32, 1, 1);
  params.keys.kv_indptr = kv_indptr;
  params.out = dense_rows(out, DType::f32, 1, 1);
  params.lse = lse;
  params.requests = params.q_heads = params.kv_heads = params.head_dim = params.head_dim_v = 1;
  params.q_indptr = q_indptr;
  params.kv_lens = kv_lens;
  kernels::reference::attention(params, threads);
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(lse[0], -std::numeric_limits<float>::infinity());
  EXPECT_EQ(out[1], 3);
  EXPECT_EQ(lse[1], 0.5f);
  // The weights are e^0.5 and e^1.
  const double weight = 1 / (1 + std::exp(-0.5));
  EXPECT_FLOAT_EQ(out[2], static_cast<float>(3 * (1 - weight) + 5 * weight));
  EXPECT_FLOAT_EQ(lse[2], static_cast<float>(std::log(std::exp(0.5) + std::exp(1.0))));
}

}  // namespace
}  // namespace fovea
