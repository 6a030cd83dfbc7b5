// SPDX-License-Identifier: Apache-2.0
// The weights of a model in the memory of one GPU.
#pragma once

#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "gpu/gpu.h"
#include "model/cuda_layout.h"
#include "model/device.h"
#include "model/located_tensors.h"

namespace fovea {

// Vectors one after another in large blocks.
class VectorMemory {
 public:
  std::byte* take(size_t bytes) {
    const VectorLayout::Place place = layout_.take(bytes);
    if (place.block == blocks_.size()) blocks_.emplace_back(layout_.blocks().back());
    return blocks_[place.block].data<std::byte>() + place.offset;
  }
  size_t bytes() const { return layout_.bytes(); }

 private:
  VectorLayout layout_;
  std::vector<gpu::DeviceBuffer> blocks_;
};

// The functions of ModelDevice with the same names. Copies have completed when they return. The GPU
// must be current on the calling thread.
class CudaWeights {
 public:
  explicit CudaWeights(Stream stream) : stream_(stream) {}

  const std::byte* place(const StoredTensor& tensor, std::string_view name);
  const std::byte* place_joined(std::span<const StoredTensor* const> tensors,
                                std::string_view name);
  const std::byte* locate(const StoredTensor& tensor, std::string_view name);
  // Places parts of equal k one below another, dense. Several must not be [k, n].
  Linear place_parts(std::span<const Linear> parts);
  std::span<const float> place(std::vector<float> values);
  const int32_t* place_ints(std::vector<int32_t> values);
  std::vector<float> read(std::span<const float> placed) const;
  size_t bytes() const { return matrix_bytes_ + vectors_.bytes(); }

 private:
  void copy_in(std::byte* to, const StoredTensor& tensor);
  void copy_part(std::byte* to, const Linear& part);
  std::span<std::byte> staging();

  Stream stream_;
  LocatedTensors located_;
  // Key: the address in the mapped file, or the tensor whose values are generated.
  std::map<const void*, gpu::DeviceBuffer> matrices_;
  std::vector<gpu::DeviceBuffer> joined_;
  gpu::PinnedBuffer staging_;  // empty until it is used
  size_t matrix_bytes_ = 0;
  VectorMemory vectors_;
};

}  // namespace fovea
