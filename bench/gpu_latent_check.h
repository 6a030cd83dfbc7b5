// SPDX-License-Identifier: Apache-2.0
// Compares sampled rows of MLA with projections against fp64 on the host.
#pragma once

#include <span>
#include <vector>

#include "bench/gpu_output_check.h"
#include "gpu/gpu.h"
#include "kernels/cuda/common/measure_params.h"

namespace fovea::bench {

// Returns one error per row. Requires a 16-bit cache of layout mla.
std::vector<kernels::cuda::RowError> latent_row_errors(
    const GpuCase& config, const CallOutput& call, std::span<const kernels::cuda::SampledRow> rows,
    Stream stream);

}  // namespace fovea::bench
