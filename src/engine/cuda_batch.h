// SPDX-License-Identifier: Apache-2.0
// The arrays of one pass on a GPU. They are filled in page-locked memory and copied to fixed device
// addresses at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache_set.h"
#include "engine/model_runner.h"
#include "engine/pass_arrays.h"
#include "fovea/batch.h"
#include "gpu/gpu.h"
#include "kernels/cuda/portable/layer_ops/launch.h"
#include "kernels/cuda/portable/sampling/launch.h"

namespace fovea {

class CudaBatch {
 public:
  // Allocates the arrays, which begin as those of empty requests, and a zeroed copy of the request
  // table on the current GPU.
  CudaBatch(const BatchLimits& limits, const RequestTable& table, int sm);

  // Fills the arrays and returns the sizes of the parts. Throws Error{invalid_argument} if they
  // exceed the limits.
  PassSize fill(std::span<const PassPart> parts, RequestTable& table);
  // [max_requests] shared prefixes of the last pass, see BatchHints.
  std::span<int32_t> shared_prefix() const {
    return {host<int32_t>(at_.shared_prefix), static_cast<size_t>(limits_.max_requests)};
  }
  // Extends the filled pass to a larger size with requests and tokens of length 0.
  void pad(const PassSize& filled, const PassSize& padded);
  // Enqueues the copies of the arrays, and of entries before the new tokens that changed in the
  // parts' rows of the request table.
  void upload(std::span<const PassPart> parts, RequestTable& table, Stream stream);

  // Enqueues the kernel that enters the new tokens' slots in the copy of the request table.
  void record_slots(const PassSize& size, Stream stream) const;

  // Enqueues the drawing of tokens from the logits [logit_rows, vocabulary].
  void draw(const PassSize& size, const float* logits, int32_t vocabulary, Stream stream) const;
  // Returns the token drawn for part i, or -1 if none was drawn. Valid after the stream has been
  // synchronised.
  int32_t drawn(size_t part) const { return drawn_.data<int32_t>()[part]; }
  const void* draws() const { return device<kernels::cuda::Draw>(at_.draws); }

  // Returns the batch as the device sees it, at addresses that never change. Bounds of the
  // requests' lengths, which decode passes do not use, are those of the pass filled last.
  BatchView view(const PassSize& size) const;
  ModelInputs inputs(const PassSize& size) const;
  size_t bytes() const { return arrays_.bytes() + table_.bytes(); }
  // Returns the bytes that the arrays take, for a table with a row for each request and the
  // reserved one. Needs no GPU.
  static size_t bytes(const BatchLimits& limits);

 private:
  // Offsets in bytes into the blocks of both host and device.
  struct Layout {
    size_t tokens, positions, logit_rows, token_rows, out_slots, q_indptr, kv_lens, rows,
        state_slots, shared_prefix, draws, total;
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
  gpu::PinnedBuffer drawn_;      // [max_requests] tokens that the GPU writes
  gpu::DeviceBuffer arrays_;
  gpu::DeviceBuffer table_;  // [max_requests, max_context]
};

}  // namespace fovea
