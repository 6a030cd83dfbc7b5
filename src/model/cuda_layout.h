// SPDX-License-Identifier: Apache-2.0
// Computes the GPU memory of weights and experts, without a GPU.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <vector>

#include "core/rounding.h"
#include "model/device.h"
#include "model/layers.h"

namespace fovea {

inline constexpr size_t kCudaAlignment = 256;

// Places vectors one after another in large blocks, because a driver allocation takes at least 2
// MB.
class VectorLayout {
 public:
  struct Place {
    size_t block = 0, offset = 0;
  };
  Place take(size_t bytes) {
    constexpr size_t kBlockBytes = size_t{2} << 20;
    if (blocks_.empty() || used_ + bytes > blocks_.back()) {
      blocks_.push_back(std::max(bytes, kBlockBytes));
      used_ = 0;
    }
    const Place place{blocks_.size() - 1, used_};
    used_ += round_up(bytes, kCudaAlignment);
    return place;
  }
  const std::vector<size_t>& blocks() const { return blocks_; }  // bytes of each block
  size_t bytes() const {
    size_t total = 0;
    for (const size_t block : blocks_) total += block;
    return total;
  }

 private:
  std::vector<size_t> blocks_;
  size_t used_ = 0;
};

// Returns the bytes of an f32 vector followed by its bf16 form. Products with bf16 results read
// their bias from the second.
inline size_t cuda_vector_bytes(size_t count) {
  return round_up(count * sizeof(float), kCudaAlignment) + count * sizeof(uint16_t);
}

// Throws Error{unsupported} if a GPU cannot multiply by the tensor.
void check_cuda_matrix(const StoredTensor& tensor, std::string_view name);
// Throws Error{unsupported} if the experts differ in shape or contain a matrix that a GPU cannot
// multiply by.
void check_cuda_experts(const std::vector<MlpParts>& experts);

// Scratch for `count` experts of one shape, for rows that go to top_k experts each.
struct CudaExpertBuffers {
  int32_t *counts, *choices;
  Rows hidden, activated, results;
};
CudaExpertBuffers cuda_expert_buffers(Arena& arena, const MlpParts& shape, int64_t count,
                                      int64_t rows, int32_t top_k);

}  // namespace fovea
