// SPDX-License-Identifier: Apache-2.0
// The draws of a pass on a GPU that wait for masks. A mask depends on the token that the pass
// before draws, so the host makes it while this pass already runs; one copy then brings draws and
// masks to the GPU.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "fovea/device.h"
#include "gpu/gpu.h"
#include "kernels/cuda/common/sampling_params.h"
#include "tokenizer/grammar/grammar.h"

namespace fovea {

// Returns the bits of a mask; 0 if no draws are `wanted`, or if the GPU draws no tokens.
inline int32_t bits_of_masks(bool wanted, int32_t vocabulary) {
  return wanted && vocabulary <= kernels::cuda::kMaxVocabulary ? vocabulary : 0;
}

class MaskedDraws {
 public:
  // Allocates room for passes of up to max_draws draws, each with a mask of `bits` bits; 0: none.
  MaskedDraws(int32_t max_draws, int32_t bits);
  // Returns the bytes that it takes on the GPU. Needs no GPU.
  static size_t bytes(int32_t max_draws, int32_t bits);
  size_t bytes() const { return buffer_.bytes(); }

  // Begins the list of a pass.
  void clear();
  // Adds the next draw of the pass. One that waits for no mask has the row -1.
  void add(const kernels::cuda::Draw& draw);
  // Returns the number of draws that wait.
  size_t waiting() const { return waiting_; }
  // Returns the list, with -1 for rows of draws that wait for none.
  std::span<const kernels::cuda::Draw> list() const { return list_; }

  // Enqueues the copies of the list and of the masks, one for each draw that waits; an empty mask
  // allows every token. The copies of earlier passes must have ended.
  void upload(std::span<const grammar::TokenMask> masks, Stream stream);
  // Sets the list and the masks of params, as the GPU sees them from draw `first` on.
  void set(size_t first, kernels::cuda::DrawParams& params) const;

 private:
  size_t list_bytes() const { return max_draws_ * sizeof(kernels::cuda::Draw); }

  size_t max_draws_ = 0;
  size_t mask_bytes_ = 0;  // bytes of one mask
  size_t waiting_ = 0;
  std::vector<kernels::cuda::Draw> list_;
  gpu::PinnedBuffer pinned_;  // the list, then the masks
  gpu::DeviceBuffer buffer_;  // likewise
};

}  // namespace fovea
