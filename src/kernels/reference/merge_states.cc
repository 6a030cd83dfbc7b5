// SPDX-License-Identifier: Apache-2.0
#include "kernels/merge_states.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/reference.h"

namespace fovea::kernels::reference {

void merge_states(const MergeStatesParams& params) {
  constexpr double kEmpty = -std::numeric_limits<double>::infinity();
  const auto dim = static_cast<size_t>(params.dim);
  std::vector<double> merged(dim);
  for (int64_t at = 0; at < params.rows * params.heads; ++at) {
    double maximum = kEmpty;
    for (int32_t part = 0; part < params.parts; ++part) {
      maximum = std::max<double>(maximum, params.lse[part * params.lse_part_stride + at]);
    }
    std::fill(merged.begin(), merged.end(), 0.0);
    double sum = 0;
    for (int32_t part = 0; part < params.parts; ++part) {
      const double lse = params.lse[part * params.lse_part_stride + at];
      if (lse == kEmpty) continue;  // skip its o: 0 * NaN is NaN
      const double weight = std::exp(lse - maximum);
      const float* o = params.o + part * params.o_part_stride + at * params.dim;
      for (size_t d = 0; d < dim; ++d) merged[d] += weight * o[d];
      sum += weight;
    }
    const double lse = maximum + std::log(sum);
    if (params.sinks && sum > 0) sum *= 1 + std::exp(params.sinks[at % params.heads] - lse);
    float* out = params.out + at * params.dim;
    for (size_t d = 0; d < dim; ++d) {
      out[d] = sum == 0 ? 0.0f : static_cast<float>(merged[d] / sum);
    }
    if (params.out_lse) params.out_lse[at] = static_cast<float>(lse);
  }
}

}  // namespace fovea::kernels::reference
