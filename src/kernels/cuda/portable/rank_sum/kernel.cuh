// SPDX-License-Identifier: Apache-2.0
// Sums over the GPUs of a process: every rank writes its values into the memory of the others and
// adds those that it gets, so that a sum takes one crossing of the link. For a few rows, where the
// time is latency.
#pragma once

#include "kernels/cuda/common/mail.cuh"
#include "kernels/cuda/common/rank_sum_params.h"
#include "kernels/cuda/portable/layer_ops/norms.cuh"

namespace fovea::kernels::cuda {

enum SumOp { values };  // the other is `residual` of layer_ops

// Sends four values at position `at` of the message, a multiple of 4, to all other ranks.
__device__ inline void send(const Mail& mail, int ranks, int at, float4 four) {
  const uint4 quad = Mail::sent(uint4{__float_as_uint(four.x), __float_as_uint(four.y),
                                      __float_as_uint(four.z), __float_as_uint(four.w)});
  for (int rank = 0; rank < ranks; ++rank) {
    if (mail.is_other(rank)) store_shared_quad(mail.to(rank) + at, quad);
  }
}

// Replaces this rank's values by the sums over all ranks, in their order, so that all get the same
// bits. at(i): the position of fours[i], or -1 if there is none.
template <int kFours, class At>
__device__ void sum(const Mail& mail, int ranks, float4 (&fours)[kFours], const At& at) {
  float4 sums[kFours] = {};
  for (int rank = 0; rank < ranks; ++rank) {
    const uint32_t* from[kFours] = {};
    uint4 quads[kFours] = {};
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (mail.is_other(rank) && at(i) >= 0) from[i] = mail.from(rank) + at(i);
    }
    mail.receive(from, quads);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 theirs = {__uint_as_float(quads[i].x), __uint_as_float(quads[i].y),
                             __uint_as_float(quads[i].z), __uint_as_float(quads[i].w)};
      const float4 four = mail.is_other(rank) ? theirs : fours[i];
      sums[i] = {sums[i].x + four.x, sums[i].y + four.y, sums[i].z + four.z, sums[i].w + four.w};
    }
  }
#pragma unroll
  for (int i = 0; i < kFours; ++i) fours[i] = sums[i];
}

template <int kThreads>
struct SumValuesConfig {
  using Params = SumValuesParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kFours = 2;  // per thread
  static constexpr KernelTraits kTraits = {kThreads, 0, kThreads* kFours * 4, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int count = static_cast<int>(params.count);
    const Mail mail(params.boxes, count);
    const auto at = [&](int i) {
      const int first = 4 * ((blockIdx.x * kFours + i) * kThreads + threadIdx.x);
      return first < count ? first : -1;
    };
    float4 fours[kFours] = {};
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (at(i) < 0) continue;
      fours[i] = *reinterpret_cast<const float4*>(params.send + at(i));
      send(mail, params.boxes.ranks, at(i), fours[i]);
    }
    mail.clear<kThreads>();
    sum(mail, params.boxes.ranks, fours, at);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      if (at(i) >= 0) *reinterpret_cast<float4*>(params.receive + at(i)) = fours[i];
    }
    mail.end();
  }
};

// The other addends and the weights of the norm are loaded while the branches travel: each trip to
// memory takes long while the weights of the next product arrive.
template <int kThreads>
struct SumResidualConfig : ResidualRows<kThreads, 4> {
  using Rows = ResidualRows<kThreads, 4>;
  using Params = SumResidualParams;
  using Rows::kFours, Rows::for_fours, Rows::load;
  static constexpr int kBlocksPerSm = 512 / kThreads;
  // With more rows, blocks of the next product begin as those of the one before the sum end. Chosen
  // on two H200, 2026-11-30: a layer is 2 % faster from 16 rows on.
  static constexpr int kFewRows = 8;

  __device__ static void run(const Params& params) {
    __shared__ float shared[kThreads / 32];
    const ResidualParams& residual = params.residual;
    const int first = blockIdx.x * residual.dim;
    float4 fours[kFours] = {}, x[kFours] = {}, weights[kFours] = {};
    for_fours(residual.dim,
              [&](int i, int column) { weights[i] = Rows::weight_at(residual.norm, column); });
    if (residual.rows > kFewRows) allow_next_kernel();
    wait_and_allow_next();
    const Mail mail(params.boxes, residual.rows * residual.dim);
    for_fours(residual.dim, [&](int i, int column) {
      fours[i] = load(residual.branch + first + column);
      x[i] = load(residual.x + first + column);
    });
    if (params.boxes.sends) {
      for_fours(residual.dim, [&](int i, int column) {
        send(mail, params.boxes.ranks, first + column, fours[i]);
      });
    }
    mail.clear<kThreads>();
    sum(mail, params.boxes.ranks, fours, [&](int i) {
      const int column = Rows::column_of(i);
      return column < residual.dim ? first + column : -1;
    });
    Rows::add_branch(residual, shared, fours, [&](int i, int) { return x[i]; });
    Rows::store_normed(residual, shared, fours, [&](int i, int) { return weights[i]; });
    mail.end();
  }
};

template <auto kOp, int kThreads>
struct SumConfig;
template <int kThreads>
struct SumConfig<values, kThreads> : SumValuesConfig<kThreads> {};
template <int kThreads>
struct SumConfig<residual, kThreads> : SumResidualConfig<kThreads> {};

template <auto kOp, int kThreads>
using Config = SumConfig<kOp, kThreads>;

}  // namespace fovea::kernels::cuda
