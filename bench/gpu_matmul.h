// SPDX-License-Identifier: Apache-2.0
// One large matrix product by cuBLASLt, loaded at run time: the peak rate that attention is
// compared with.
#pragma once

#include <memory>

#include "fovea/device.h"
#include "fovea/dtype.h"

namespace fovea::bench {

// Computes c = a^T b for square matrices, with f32 sums and bf16 c. `dtype` of a and b is bf16 or
// f8e4m3.
class SquareMatmul {
 public:
  // Throws Error{unsupported} if cuBLASLt is missing or fails, with its status.
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
