// SPDX-License-Identifier: Apache-2.0
// Weights made from a seed instead of read from files, so that a config alone is a model: of any
// size, with finite logits, and always with the same bits.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "fovea/dtype.h"
#include "fovea/thread_pool.h"
#include "model/config.h"
#include "model/safetensors.h"

namespace fovea {

// Element `index` of a tensor depends on the seed, the tensor's name and the index only, up to
// rounding to the dtype.
class RandomWeights {
 public:
  // The dtype is the config's `dtype` or `torch_dtype`, else bf16. `threads` make the values and
  // outlive this object and every tensor. Error{unsupported} where weights have no such dtype.
  RandomWeights(const Config& config, uint64_t seed, ThreadPool& threads);

  // The same object each time a name is asked for, valid as long as this one. Error
  // {invalid_argument} when it was asked for with another shape.
  const StoredTensor& tensor(std::string_view name, std::span<const int64_t> shape,
                             const InitialValues& values);

 private:
  DType dtype_;
  uint64_t seed_;
  ThreadPool* threads_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
};

}  // namespace fovea
