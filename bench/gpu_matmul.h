// SPDX-License-Identifier: Apache-2.0
// One large matrix product by cuBLASLt, found at run time: the peak that attention is held against.
#pragma once

#include <memory>

#include "fovea/device.h"
#include "fovea/dtype.h"

namespace fovea::bench {

// c = a^T b for square matrices, f32 sums, c in bf16. `dtype` of a and b: bf16 or f8e4m3.
class SquareMatmul {
 public:
  // Error{unsupported} without cuBLASLt or with its status.
  SquareMatmul(DType dtype, int64_t size);
  ~SquareMatmul();
  void run(const void* a, const void* b, void* c, Stream stream) const;
  double flops() const {
    const auto size = static_cast<double>(size_);
    return 2 * size * size * size;
  }

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
  int64_t size_;
};

}  // namespace fovea::bench
