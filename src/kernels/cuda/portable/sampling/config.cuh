// SPDX-License-Identifier: Apache-2.0
// Data of a draw: the row, amounts of its tokens, and histograms of the amounts.
#pragma once

#include "kernels/cuda/common/ptx.cuh"
#include "kernels/cuda/common/sampling_params.h"

namespace fovea::kernels::cuda {

constexpr int kBuckets = 2048;
constexpr double kBucketsPerUnit = 64;  // buckets a unit of ln(p_max / p); beyond 32 weights are 0

struct Amount {
  uint64_t weight;
  uint32_t count;
};

struct Histogram {
  unsigned long long weight[kBuckets];
  uint32_t count[kBuckets];
};

// The place at which a running sum passes its target: the amounts before it, and the token. If the
// token is not known (-1), it is one of those whose logit has this key.
struct Place {
  uint32_t key;
  int token;
  Amount before;
};

// Dynamic shared memory: launches with more than 48 KB must request it.
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

// One row of logits and the parameters of its draw, the same in every thread.
struct Row {
  const float* logits;
  int vocabulary;
  double largest;
  double inverse;  // 1 / temperature
  double min_p;

  // Returns ln(p_max / p), which grows from rank to rank.
  __device__ double depth(float logit) const {
    return (largest - static_cast<double>(logit)) * inverse;
  }
  // Returns p / p_max, or 0 for tokens that the CPU drops.
  __device__ double share(float logit) const {
    const double x = depth(logit);
    const double p = x < 746 ? exp(-x) : 0;  // beyond, even a denormal is 0
    return p >= min_p ? p : 0;
  }
  // Returns 0 also for tokens that are too unlikely to be drawn.
  __device__ uint64_t weight(float logit) const {
    if (bucket(logit) == kBuckets) return 0;
    return __double2ull_rn(share(logit) * (1ull << kWeightBits));
  }
  __device__ int bucket(float logit) const {
    const double x = depth(logit);
    return x < kBuckets / kBucketsPerUnit ? static_cast<int>(x * kBucketsPerUnit) : kBuckets;
  }
};

// Returns a key that ascends as logits descend; -0 and +0 are equal.
__device__ inline uint32_t key_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  return bits & 0x80000000u ? bits : ~(bits | 0x80000000u);
}
__device__ inline float logit_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key : ~key & 0x7fffffffu);
}

}  // namespace fovea::kernels::cuda
