// SPDX-License-Identifier: Apache-2.0
// Generates weights from a seed, so that a config alone makes a model of any size, with finite
// logits and reproducible bits.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "fovea/dtype.h"
#include "fovea/thread_pool.h"
#include "model/json_object.h"
#include "model/safetensors.h"

namespace fovea {

// Element `index` of a tensor depends only on the seed, the tensor's name and the index, up to
// rounding to the dtype.
class RandomWeights {
 public:
  // The dtype is the config's `dtype` or `torch_dtype`, by default bf16. `threads` generates the
  // values and must outlive this object and all tensors. Throws Error{unsupported} for a dtype that
  // weights cannot have.
  RandomWeights(const JsonObject& config, uint64_t seed, ThreadPool& threads);

  // Returns the same object for every request of a name; it is valid as long as this object. Throws
  // Error{invalid_argument} if an earlier request had another shape.
  const StoredTensor& tensor(std::string_view name, std::span<const int64_t> shape,
                             const InitialValues& values);

 private:
  DType dtype_;
  uint64_t seed_;
  ThreadPool* threads_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
};

}  // namespace fovea
