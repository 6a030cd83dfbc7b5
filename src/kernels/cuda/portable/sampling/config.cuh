// SPDX-License-Identifier: Apache-2.0
// What a draw is made of: the row, amounts of its tokens, histograms of them.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/sampling_params.h"

namespace fovea::kernels::cuda {

constexpr int kBuckets = 2048;
constexpr double kBucketsPerUnit = 64;  // of ln(p_max / p): what is beyond 32 has no weight

struct Amount {
  uint64_t weight;
  uint32_t count;
};

struct Histogram {
  unsigned long long weight[kBuckets];
  uint32_t count[kBuckets];
};

// Where a running sum passes its target: the amounts in front, then this token; or, where that is
// not known (-1), one of those with a logit of this key.
struct Place {
  uint32_t key;
  int token;
  Amount before;
};

// All of it is dynamic: above 48 KB a launch must have asked for it.
template <int kThreads>
struct SamplingShared {
  Histogram coarse, fine;
  Amount warps[kThreads / 32];
  Amount before;
  int bucket;
  int candidates;
  Place place;
  float largest[kThreads / 32];
  int best[kThreads / 32];
};

// One row and what its draw needs, the same in every thread.
struct Row {
  const float* logits;
  int vocabulary;
  double largest;
  double inverse;  // of the temperature
  double min_p;

  // ln(p_max / p); grows from rank to rank.
  __device__ double depth(float logit) const {
    return (largest - static_cast<double>(logit)) * inverse;
  }
  // p / p_max; 0 where the CPU drops the token.
  __device__ double share(float logit) const {
    const double x = depth(logit);
    const double p = x < 746 ? exp(-x) : 0;  // beyond, even a denormal is 0
    return p >= min_p ? p : 0;
  }
  // 0 also for what is too unlikely to be drawn.
  __device__ uint64_t weight(float logit) const {
    if (bucket(logit) == kBuckets) return 0;
    return __double2ull_rn(share(logit) * (1ull << kWeightBits));
  }
  __device__ int bucket(float logit) const {
    const double x = depth(logit);
    return x < kBuckets / kBucketsPerUnit ? static_cast<int>(x * kBucketsPerUnit) : kBuckets;
  }
};

// Ascends where logits descend; -0 and +0 are equal.
__device__ inline uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}
__device__ inline float logit_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

}  // namespace fovea::kernels::cuda
