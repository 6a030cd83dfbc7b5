// SPDX-License-Identifier: Apache-2.0
// The arrays of one pass on a GPU: filled in page-locked memory, brought to fixed device addresses
// with one copy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache_set.h"
#include "engine/model_runner.h"
#include "fovea/batch.h"
#include "gpu/gpu.h"
#include "kernels/cuda/portable/layer_ops/launch.h"
#include "kernels/cuda/portable/sampling/launch.h"

namespace fovea {

// A pass of `requests` requests with `tokens` new tokens and logits of `logit_rows` of them. In a
// captured pass these are the sizes of its bucket.
struct PassSize {
  int32_t requests = 0, tokens = 0, logit_rows = 0;
  int32_t max_q_len = 0, max_kv_len = 0;
  bool draws = false;            // tokens are drawn, of up to `requests` rows
  bool shares_prefixes = false;  // the batch names its shared prefixes
  ForwardMode mode = ForwardMode::extend;
};

class CudaBatch {
 public:
  // For the current GPU. Allocates the arrays, which begin as those of empty requests, and a zeroed
  // copy of the request table.
  CudaBatch(const BatchLimits& limits, const RequestTable& table, int sm);

  // Fills the arrays; the size is that of the parts. Throws Error{invalid_argument} where they
  // exceed the limits.
  PassSize fill(std::span<const PassPart> parts, RequestTable& table);
  // [max_requests] of the pass that was filled, see BatchView.
  std::span<int32_t> shared_prefix() const {
    return {host<int32_t>(at_.shared_prefix), static_cast<size_t>(limits_.max_requests)};
  }
  // The rest of a larger pass: requests and tokens of length 0.
  void pad(const PassSize& filled, const PassSize& padded);
  // Enqueues the copies of the arrays and of what changed in the parts' rows of the request table
  // in front of their new tokens.
  void upload(std::span<const PassPart> parts, RequestTable& table, Stream stream);

  // Enqueues the entry of the new tokens' slots in the copy of the request table.
  void record_slots(const PassSize& size, Stream stream) const;

  // Enqueues the draws of a pass from its logits [logit_rows, vocabulary].
  void draw(const PassSize& size, const float* logits, int32_t vocabulary, Stream stream) const;
  // Of part i, once the stream has been waited for; -1: none was drawn.
  int32_t drawn(size_t part) const { return drawn_.data<int32_t>()[part]; }
  const void* draws() const { return device<kernels::cuda::Draw>(at_.draws); }

  // As the device sees it. The addresses never change. The bounds of each request's lengths, which
  // decode passes do without, are those of the pass that was filled.
  BatchView view(const PassSize& size) const;
  ModelInputs inputs(const PassSize& size) const;
  size_t bytes() const { return arrays_.bytes() + table_.bytes(); }
  // The same without a GPU, with a table that has a row for each request beside the reserved one.
  static size_t bytes(const BatchLimits& limits);

 private:
  // Offsets in bytes into both blocks.
  struct Layout {
    size_t tokens, positions, logit_rows, token_rows, out_slots, q_indptr, kv_lens, rows,
        shared_prefix, draws, total;
  };
  static Layout layout(const BatchLimits& limits);
  template <typename T>
  T* host(size_t offset) const {
    return reinterpret_cast<T*>(pinned_.data<std::byte>() + offset);
  }
  template <typename T>
  const T* device(size_t offset) const {
    return reinterpret_cast<const T*>(arrays_.data<std::byte>() + offset);
  }

  kernels::cuda::SlotRecorder recorder_;
  kernels::cuda::Sampling sampling_;
  BatchLimits limits_;
  Layout at_;
  int32_t table_rows_;
  int64_t table_stride_;
  gpu::PinnedBuffer pinned_;
  std::vector<int32_t> q_lens_;  // [max_requests]
  gpu::PinnedBuffer drawn_;      // [max_requests] tokens, written by the GPU
  gpu::DeviceBuffer arrays_;
  gpu::DeviceBuffer table_;  // [max_requests, max_context]
};

}  // namespace fovea
