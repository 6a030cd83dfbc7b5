// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm.h"

#include <vector>

#include "core/float_types.h"
#include "kernels/reference/reference.h"

namespace fovea::kernels::reference {
namespace {

// Returns row n of the weight in either storage order.
void load_weight_row(const GemmParams& params, int64_t n, std::vector<double>& to) {
  for (int64_t k = 0; k < params.k; ++k) {
    const int64_t at =
        params.weight_is_kn ? k * params.weight_stride + n : n * params.weight_stride + k;
    to[static_cast<size_t>(k)] = load_float(params.weight, params.weight_dtype, at);
  }
}

}  // namespace

void gemm(const GemmParams& params, ThreadPool& threads) {
  threads.parallel_for(params.n, [&](int64_t n, int) {
    std::vector<double> weight(static_cast<size_t>(params.k));
    load_weight_row(params, n, weight);
    for (int64_t row = 0; row < params.rows; ++row) {
      const float* x = params.x + row * params.x_stride;
      double sum = params.bias ? params.bias[n] : 0.0;
      for (int32_t k = 0; k < params.k; ++k) sum += x[k] * weight[static_cast<size_t>(k)];
      params.out[row * params.out_stride + n] = static_cast<float>(sum);
    }
  });
}

}  // namespace fovea::kernels::reference
