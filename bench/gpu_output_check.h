// SPDX-License-Identifier: Apache-2.0
// Verifies the output of a call. Wrong output is never timed.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "bench/gpu_cases.h"
#include "bench/gpu_ceilings.h"

namespace fovea::bench {

// The inputs and outputs of a finished call. All are on the device except q_indptr.
struct CallOutput {
  KvLayerView keys;
  const void* q = nullptr;    // [tokens, q_heads, q_width], dense
  const void* out = nullptr;  // [tokens, q_heads, out_width], dense; NaN before the call
  DType out_dtype = DType::bf16;
  const void* w_uk = nullptr;           // [q_heads, nope_dim, kv_lora_rank] with MLA's weights
  const void* w_uv = nullptr;           // [q_heads, v_dim, kv_lora_rank]
  const float* sinks = nullptr;         // [q_heads] or null
  const float* alibi_slopes = nullptr;  // [q_heads] or null
  const int32_t* slots = nullptr;       // [requests, longest_kv]: the slot of each token
  std::span<const int32_t> q_indptr;
};

struct OutputError {
  double relative = 0;   // ||out - fp64|| / ||fp64|| over the sampled rows
  double worst_row = 0;  // error of the worst row
  std::string problem;   // reason why the output is wrong; otherwise empty
};

// Reports a problem if an element was not written or sampled rows have large errors.
OutputError check_output(const GpuCase& config, const CallOutput& call, MeasureKernels& kernels,
                         Stream stream);

}  // namespace fovea::bench
