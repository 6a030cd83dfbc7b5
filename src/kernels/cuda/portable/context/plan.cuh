// SPDX-License-Identifier: Apache-2.0
// The batch of a rank that holds a part of each context.
#pragma once

#include "kernels/cuda/common/context_params.h"
#include "kernels/cuda/common/overlap.cuh"

namespace fovea::kernels::cuda {

struct ContextPlanConfig {
  using Params = ContextPlanParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kThreads = 256;
  static constexpr KernelTraits kTraits = {kThreads, 0, kThreads, 0};

  __device__ static void run(const Params& params) {
    wait_and_allow_next();
    const int first = blockIdx.x * kThreads + threadIdx.x, step = gridDim.x * kThreads;
    for (int token = first; token < params.tokens; token += step) place_token(params, token);
    for (int i = first; i < params.requests * params.classes; i += step) divide(params, i);
    if (first == 0) end_indptr(params);
    for (int request = blockIdx.x; request < params.requests; request += gridDim.x) {
      list_pages(params, request);
    }
  }

 private:
  struct Request {
    int begin, q_len, kv_len;
    // Position of new token j plus 1, which may be negative.
    __device__ int end_of(int j) const { return kv_len - q_len + j + 1; }
  };
  __device__ static Request request_at(const Params& params, int i) {
    return {params.q_indptr[i], params.q_indptr[i + 1] - params.q_indptr[i], params.kv_lens[i]};
  }

  // As ContextShards::local_length().
  __device__ static int local_length(const Params& params, int length) {
    if (length <= 0) return 0;
    const int period = params.interleave * params.ranks;
    const int rest = length % period - params.rank * params.interleave;
    return length / period * params.interleave + min(max(rest, 0), params.interleave);
  }
  // As ContextShards::local_slot().
  __device__ static int64_t local_slot(const Params& params, int64_t slot) {
    const int64_t wide = static_cast<int64_t>(params.page_size) * params.ranks;
    if (slot < 0) return -1;
    const int token = static_cast<int>(slot % wide);
    if (token / params.interleave % params.ranks != params.rank) return -1;
    const int period = params.interleave * params.ranks;
    return slot / wide * params.page_size + token / period * params.interleave +
           token % params.interleave;
  }

  // The request of a token, which is one of the batch.
  __device__ static int request_of(const Params& params, int token) {
    int low = 0, high = params.requests - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (params.q_indptr[middle] <= token) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

  __device__ static void place_token(const Params& params, int token) {
    const bool exists = token < params.q_indptr[params.requests];
    params.slots[token] =
        exists && params.out_slots ? local_slot(params, params.out_slots[token]) : -1;
    if (!exists) params.order[token] = token;
    if (!exists && params.classes == 0) set_local(params, token, token, 0, 0);
    if (!exists) return;
    const int i = request_of(params, token);
    const Request request = request_at(params, i);
    const int j = token - request.begin;
    if (params.classes == 0) {
      params.order[token] = token;
      return set_local(params, token, token, i, local_length(params, request.end_of(j)));
    }
    const int row = begin_of_class(params, request, j % params.classes) + j / params.classes;
    params.order[row] = token;
  }

  __device__ static int begin_of_class(const Params& params, const Request& request, int index) {
    return request.begin + index * (request.q_len / params.classes) +
           min(index, request.q_len % params.classes);
  }

  // Local request i.
  __device__ static void divide(const Params& params, int i) {
    const int index = i % params.classes;
    const Request request = request_at(params, i / params.classes);
    const int begin = begin_of_class(params, request, index);
    const int last = (request.q_len - 1 - index) / params.classes * params.classes + index;
    const int length = request.q_len > index ? local_length(params, request.end_of(last)) : 0;
    set_local(params, i, begin, i / params.classes, length);
  }

  __device__ static void set_local(const Params& params, int i, int begin, int row, int length) {
    params.local_indptr[i] = begin;
    params.local_rows[i] = row;
    params.local_lens[i] = length;
  }

  __device__ static void end_indptr(const Params& params) {
    if (params.classes == 0) {
      params.local_indptr[params.tokens] = params.tokens;
    } else {
      params.local_indptr[params.requests * params.classes] = params.q_indptr[params.requests];
    }
  }

  // Pages of the whole have the same numbers in the rank's pool.
  __device__ static void list_pages(const Params& params, int request) {
    const int64_t wide = static_cast<int64_t>(params.page_size) * params.ranks;
    const int32_t* const entries =
        params.table + params.request_rows[request] * params.table_stride;
    const int length = local_length(params, params.kv_lens[request]);
    const int64_t count =
        min(static_cast<int64_t>(length + params.page_size - 1) / params.page_size,
            params.pages_stride);
    for (int64_t page = threadIdx.x; page < count; page += kThreads) {
      const int64_t first = page * wide;
      const int64_t slot =
          static_cast<int64_t>(entries[first / params.entry_tokens]) * params.entry_tokens +
          first % params.entry_tokens;
      params.pages[request * params.pages_stride + page] =
          slot < 0 ? 0 : static_cast<int32_t>(slot / wide);
    }
  }
};

}  // namespace fovea::kernels::cuda
