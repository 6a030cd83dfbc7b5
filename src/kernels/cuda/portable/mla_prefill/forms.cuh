// SPDX-License-Identifier: Apache-2.0
// Chooses which requests of a pass are up-projected, from lengths on the device, in one block.
#pragma once

#include "kernels/cuda/portable/mla_prefill/config.cuh"

namespace fovea::kernels::cuda {

struct FormsConfig {
  using Params = MlaFormsParams;
  static constexpr int kThreads = 1024;  // as exclusive_scan counts
  static constexpr int kBlocksPerSm = 1;
  static constexpr KernelTraits kTraits = {kThreads, 0, 0, 0};

  // choose_mla_form in integers: the extra cost of the absorbed form for all pairs of query and key
  // against the cost of projecting the context.
  __device__ static bool is_up_projected(const Params& params, int q_len, int kv_len) {
    if (q_len < params.min_q_len || kv_len < q_len) return false;
    if (params.by_q_len) return true;
    const int64_t projected = params.nope_dim + params.v_dim;
    const int64_t twice_pairs = static_cast<int64_t>(q_len) * (2 * int64_t{kv_len} - q_len + 1);
    const int64_t more = 2 * params.kv_lora_rank - projected;
    const int64_t context = static_cast<int64_t>(kv_len - q_len) * params.kv_lora_rank * projected;
    return twice_pairs * more > 2 * context;
  }

  __device__ static void run(const Params& params) {
    __shared__ ScanMemory<int64_t> memory;
    wait_and_allow_next();
    int64_t wanted_before = 0;
    int64_t taken_before = 0;
    for (int base = 0; base < params.requests; base += kThreads) {
      const int request = base + static_cast<int>(threadIdx.x);
      const bool exists = request < params.requests;
      const int begin = exists ? params.q_indptr[request] : 0;
      const int q_len = exists ? params.q_indptr[request + 1] - begin : 0;
      const int kv_len = exists ? params.kv_lens[request] : 0;
      const bool wanted = exists && is_up_projected(params, q_len, kv_len);
      const int64_t rows = !wanted ? 0 : params.at_once ? kv_len : kv_len - q_len;
      int64_t total;
      const int64_t wanted_at = wanted_before + exclusive_scan(rows, total, memory);
      wanted_before += total;
      const bool taken = wanted && wanted_at + rows <= params.max_rows;
      const int64_t at = taken_before + exclusive_scan(taken ? rows : int64_t{0}, total, memory);
      taken_before += total;
      if (!exists) continue;
      params.up_requests[request] = taken;
      params.new_lens[request] = taken ? q_len : 0;
      params.row_indptr[request] = static_cast<int32_t>(at);
    }
    if (threadIdx.x == 0) params.row_indptr[params.requests] = static_cast<int32_t>(taken_before);
    __syncthreads();
    describe_chunk(params.chunk, params.requests, params.q_indptr, params.row_indptr, 0);
    // The block's threads are divided among the requests in whole warps.
    int lanes = kThreads;
    while (lanes > 32 && lanes * params.requests > kThreads) lanes /= 2;
    const int thread = static_cast<int>(threadIdx.x);
    for (int request = thread / lanes; request < params.requests; request += kThreads / lanes) {
      const uint8_t up = params.up_requests[request];
      for (int token = params.q_indptr[request] + thread % lanes;
           token < params.q_indptr[request + 1]; token += lanes) {
        params.up_tokens[token] = up;
      }
    }
  }
};

}  // namespace fovea::kernels::cuda
