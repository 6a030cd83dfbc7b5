// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over the arrays of several ranks, in the order of the ranks.
#pragma once

#include <cstdint>
#include <span>

#include "fovea/communicator.h"

namespace fovea {

struct RankArrays {
  std::span<const void* const> in;  // one array for each rank
  std::span<void* const> out;       // may contain arrays of `in`
  DType dtype = DType::f32;
  ReduceOp op = ReduceOp::sum;
};

// Sets out[k][i] = op over r of in[r][i] for i in [begin, end) and every array of `out`. fp16 and
// bf16 are summed in fp32 and rounded once.
void reduce_ranks(const RankArrays& arrays, int64_t begin, int64_t end);

}  // namespace fovea
