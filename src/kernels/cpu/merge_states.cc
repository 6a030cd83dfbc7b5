// SPDX-License-Identifier: Apache-2.0
#include "kernels/merge_states.h"

#include <algorithm>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd/merge_states.h"

namespace fovea::kernels::cpu {

void merge_states(const MergeStatesParams& params, ThreadPool& threads, Isa isa) {
  const auto merge = FOVEA_FOR_ISA(isa, merge_state_rows);
  const int64_t row_elements = std::max<int64_t>(1, int64_t{params.parts} * params.dim);
  parallel_ranges(threads, params.rows * params.heads, 16384 / row_elements,
                  [&](int64_t begin, int64_t end) { merge(params, begin, end); });
}

}  // namespace fovea::kernels::cpu
