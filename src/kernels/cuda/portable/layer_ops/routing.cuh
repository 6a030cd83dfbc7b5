// SPDX-License-Identifier: Apache-2.0
// Mixtures of experts: the choice of experts for each row, the list of rows for each expert, and
// the sum of the experts' results. Counts stay on the device.
#pragma once

#include "kernels/cuda/portable/layer_ops/config.cuh"

namespace fovea::kernels::cuda {

struct RoutingConfig {
  using Params = RoutingParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {32, 0, 1, 0};

  // Returns the index of the largest choice, the lowest one if several are equal, or -1 if all are
  // taken. NaN marks taken choices.
  __device__ static int best_of(const float* choice, int count) {
    int best = -1;
    float most = 0;
    for (int i = threadIdx.x; i < count; i += 32) {
      if (choice[i] == choice[i] && (best < 0 || choice[i] > most)) {
        best = i;
        most = choice[i];
      }
    }
    for (int step = 16; step > 0; step /= 2) {
      const int other = __shfl_xor_sync(~0u, best, step);
      const float value = __shfl_xor_sync(~0u, most, step);
      const bool wins = best < 0 || value > most || (value == most && other < best);
      if (other >= 0 && wins) {
        best = other;
        most = value;
      }
    }
    return best;
  }

  __device__ static void softmax(float* x, int count) {
    float most = -infinity();
    for (int i = threadIdx.x; i < count; i += 32) most = fmaxf(most, x[i]);
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    float sum = 0;
    for (int i = threadIdx.x; i < count; i += 32) sum += x[i] = expf(x[i] - most);
    sum = warp_sum(sum);
    for (int i = threadIdx.x; i < count; i += 32) x[i] /= sum;
    __syncwarp();
  }

  __device__ static bool is_grouped(int score) {
    return score == kScoreGroupedSigmoid || score == kScoreGroupedSoftmax;
  }
  __device__ static bool is_softmax(int score) {
    return score == kScoreSoftmax || score == kScoreGroupedSoftmax;
  }

  // Drops all experts but those of the best groups. A group ranks by its best score or, with
  // sigmoid scores, by the sum of its best two.
  __device__ static void keep_best_groups(const Params& params, float* choice, float* ranks) {
    const int size = params.experts / params.groups;
    for (int group = threadIdx.x; group < params.groups; group += 32) {
      float first = -infinity();
      float second = -infinity();
      for (int i = group * size; i < (group + 1) * size; ++i) {
        if (choice[i] > first) {
          second = first;
          first = choice[i];
        } else if (choice[i] > second) {
          second = choice[i];
        }
      }
      const bool counts_two = params.score == kScoreGroupedSigmoid && size > 1;
      ranks[group] = counts_two ? first + second : first;
    }
    __syncwarp();
    for (int k = 0; k < params.top_groups; ++k) {
      const int group = best_of(ranks, params.groups);
      __syncwarp();
      if (threadIdx.x == 0) ranks[group] = not_a_number();
      for (int i = group * size + threadIdx.x; i < (group + 1) * size; i += 32) {
        ranks[params.groups + i] = choice[i];
      }
      __syncwarp();
    }
    for (int i = threadIdx.x; i < params.experts; i += 32) choice[i] = ranks[params.groups + i];
    __syncwarp();
  }

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    __shared__ float choice[kMaxRoutedExperts];
    __shared__ float weight[kMaxRoutedExperts];
    __shared__ float groups[2 * kMaxRoutedExperts];
    const int64_t row = blockIdx.x;
    const int lane = threadIdx.x;
    const float* const logits = params.logits + row * params.experts;
    for (int i = lane; i < params.experts; i += 32) choice[i] = logits[i];
    __syncwarp();
    if (is_softmax(params.score)) softmax(choice, params.experts);
    for (int i = lane; i < params.experts; i += 32) {
      const bool sigmoid = params.score == kScoreSigmoid || params.score == kScoreGroupedSigmoid;
      weight[i] = sigmoid ? sigmoid_of(choice[i]) : choice[i];
      if (params.score == kScoreGroupedSigmoid) {
        choice[i] = weight[i] + (params.bias ? params.bias[i] : 0.0f);
      }
      // NaN ranks below everything else; it appears in the weight only.
      if (choice[i] != choice[i]) choice[i] = -infinity();
      groups[params.groups + i] = -infinity();
    }
    __syncwarp();
    if (is_grouped(params.score) && params.top_groups < params.groups) {
      keep_best_groups(params, choice, groups);
    }
    int32_t* const ids = params.ids + row * params.top_k;
    float* const chosen = groups;  // [top_k]
    float sum = 0;
    for (int k = 0; k < params.top_k; ++k) {
      const int best = best_of(choice, params.experts);
      sum += weight[best];
      __syncwarp();
      if (lane == 0) {
        const int place = best - params.first_own;
        ids[k] = place >= 0 && place < params.own ? place : -1;
        chosen[k] = weight[best];
        choice[best] = not_a_number();
      }
      __syncwarp();
    }
    if (params.score == kScoreTopkSoftmax) softmax(chosen, params.top_k);
    const bool divides = is_softmax(params.score) || is_grouped(params.score);
    for (int k = lane; k < params.top_k; k += 32) {
      const bool is_divided = params.normalise && divides;
      const float value = is_divided ? chosen[k] / (sum + params.sum_epsilon) : chosen[k];
      params.weights[row * params.top_k + k] = value * params.factor;
    }
  }
};

struct GroupConfig {
  using Params = GroupParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {32, 0, 0, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int expert = blockIdx.x;
    const int lane = threadIdx.x;
    const int64_t choices = static_cast<int64_t>(params.rows) * params.top_k;
    int32_t* const list = params.list + static_cast<int64_t>(expert) * params.rows;
    int count = 0;
    for (int64_t base = 0; base < choices; base += 32) {
      const int64_t at = base + lane;
      const bool mine = at < choices && params.ids[at] == expert;
      const uint32_t found = __ballot_sync(~0u, mine);
      const int place = count + __popc(found & ((1u << lane) - 1));
      if (mine && place < params.rows) list[place] = static_cast<int32_t>(at);
      count += __popc(found);
    }
    if (lane == 0) params.counts[expert] = min(count, params.rows);
  }
};

struct CombineConfig {
  using Params = CombineParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kThreads = 256;
  static constexpr KernelTraits kTraits = {kThreads, 0, 1, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int64_t row = blockIdx.x;
    const int32_t* const ids = params.ids + row * params.top_k;
    for (int column = threadIdx.x; column < params.dim; column += kThreads) {
      float sum = params.adds ? params.out[row * params.dim + column] : 0.0f;
      // Visits the row's experts in ascending order; it has none twice.
      for (int last = -1, k = 0; k < params.top_k; ++k) {
        int next = 0x7fffffff;
        int at = 0;
        for (int i = 0; i < params.top_k; ++i) {
          if (ids[i] > last && ids[i] < next) {
            next = ids[i];
            at = i;
          }
        }
        if (next == 0x7fffffff) break;
        last = next;
        const int64_t choice = row * params.top_k + at;
        const float weight = params.weights ? params.weights[choice] : 1.0f;
        sum += weight * params.results[choice * params.dim + column];
      }
      params.out[row * params.dim + column] = sum;
    }
  }
};

}  // namespace fovea::kernels::cuda
