// SPDX-License-Identifier: Apache-2.0
// Verifies a checkpoint: compares the engine's outputs with the reference outputs in its folder.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"
#include "fovea/engine.h"
#include "fovea/parallel_engine.h"

namespace FOVEA_API fovea {

// The model folder holds reference.safetensors (prompt_<k>.input_ids, .last_logits, .greedy_64,
// validation.input_ids) and reference.json (validation.perplexity and tokens_per_window).
struct VerifyOptions {
  EngineOptions engine = {};               // all options but backend and kv_dtype, which vary
  ParallelOptions parallel = {};           // ranks that share the model
  std::vector<std::string> backends = {};  // names; empty: every backend that accepts the model
  std::vector<DType> kv_dtypes = {DType::f32, DType::bf16, DType::f16, DType::f8e4m3};
  bool perplexity = true;  // over the whole validation text
  // Called before each combination and each prompt or window.
  std::function<void(std::string_view)> progress = {};
};

struct VerifyRow {
  std::string backend;
  DType kv_dtype = DType::f32;
  std::string unsupported;         // why this combination cannot run; figures are then absent
  float max_logit_difference = 0;  // over the last logits of all prompts
  int32_t greedy_equal = 0;  // generated tokens equal to the reference up to the first difference
  int32_t greedy_total = 0;
  double perplexity = 0;         // 0 when not asked for
  double perplexity_change = 0;  // relative to the reference
  bool pass = false;             // see verify_limits
};

// The differences that a cache dtype may cause.
struct VerifyLimits {
  float logit_difference;    // infinity: any finite difference
  bool greedy_equal;         // every greedy token must be equal
  double perplexity_change;  // relative
};
// Returns the limits of a dtype. Logits and greedy tokens are checked for fp32 only.
VerifyLimits verify_limits(DType kv_dtype);

// Runs every combination of backend and cache dtype. Throws Error{io} or {corrupt_file} if the
// folder has no usable reference, and as load_parallel_engine() for ranks that cannot be.
std::vector<VerifyRow> verify_model(const VerifyOptions& options);

}  // namespace fovea
