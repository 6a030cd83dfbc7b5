// SPDX-License-Identifier: Apache-2.0
// The up-projected form: plain MHA over K and V computed from the latents. It takes one request at
// a time and a bounded chunk of its context at a time, and merges chunks by their log-sum-exp.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "attention/host/backend.h"

namespace fovea {

class HostUpProjectedMla {
 public:
  // For requests of max_tokens tokens of `heads` heads, or of fewer tokens of all heads.
  void carve(WorkspaceCarver& workspace, const HostShape& shape, const BatchLimits& limits,
             int32_t chunk_rows, int32_t heads);
  // shape: has the heads of each run().
  void plan(const HostShape& shape) { shape_ = shape; }
  void run(const BatchView& batch, int32_t request, const LayerTensors& layer,
           const KvLayerView& cache, ThreadPool& threads);

 private:
  // Queries [begin, end) of the request against the keys of the current chunk.
  struct Part {
    int32_t begin = 0, end = 0;
    bool causal = false;
  };

  void start(const BatchView& batch, int32_t request, const LayerTensors& layer,
             ThreadPool& threads);
  void project(const MlaWeights& given, int64_t rows, ThreadPool& threads);
  void attend(const Part& part, int32_t keys, ThreadPool& threads);
  void finish(const LayerTensors& layer, ThreadPool& threads);

  HostShape shape_;
  int32_t chunk_rows_ = 0;
  int64_t query_heads_ = 0;  // pairs of query and head that fit the buffers
  int64_t first_row_ = 0;    // the request's first row in the batch
  int32_t q_len_ = 0;
  HeadRows q_, q_rope_;  // the request's queries

  float* latents_ = nullptr;  // [chunk_rows, lora + rope]
  float* k_ = nullptr;        // [chunk_rows, q_heads, nope + rope]
  float* v_ = nullptr;        // [chunk_rows, q_heads, v_dim]
  float* queries_ = nullptr;  // [query_heads, nope + rope] if q is not f32
  float* out_ = nullptr;      // [2, query_heads, v_dim]: sum so far, this chunk
  float* lse_ = nullptr;      // [2, query_heads]
  std::span<std::byte> schedule_memory_;
  std::array<int32_t, 2> q_indptr_{}, kv_indptr_{};
};

}  // namespace fovea
