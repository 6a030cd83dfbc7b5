// SPDX-License-Identifier: Apache-2.0
// Is this checkpoint computed right? Compares with the reference outputs a checkpoint folder
// carries.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/engine.h"

namespace fovea {

// The folder holds reference.safetensors (prompt_<k>.input_ids, .last_logits, .greedy_64,
// validation.input_ids) and reference.json (validation.perplexity and tokens_per_window).
struct CheckOptions {
  EngineOptions engine = {};  // model_path, page size, threads; backend and kv_dtype are varied
  std::vector<std::string> backends = {};  // names; empty: every backend that accepts the model
  std::vector<DType> kv_dtypes = {DType::f32, DType::bf16, DType::f16, DType::f8e4m3};
  bool perplexity = true;  // over the whole validation text
  // Called before each combination and each prompt or window, for progress.
  std::function<void(std::string_view)> progress = {};
};

struct CheckRow {
  std::string backend;
  DType kv_dtype = DType::f32;
  std::string unsupported;         // why this combination cannot run; the figures are then absent
  float max_logit_difference = 0;  // over the last logits of all prompts
  int32_t greedy_equal = 0;  // generated tokens equal to the reference up to the first difference
  int32_t greedy_total = 0;
  double perplexity = 0;         // 0 when not asked for
  double perplexity_change = 0;  // relative to the reference
  bool pass = false;             // see check_limits
};

// What a cache of this dtype may change: fp32 2e-3 in any logit, every greedy token and 0.1 % of
// perplexity; bf16 and fp16 1 %, fp8 3 % of perplexity.
struct CheckLimits {
  float logit_difference;  // infinity: any, as long as it is a number
  bool greedy_equal;
  double perplexity_change;
};
CheckLimits check_limits(DType kv_dtype);

// Error{io} or {corrupt_file} when the folder carries no usable reference.
std::vector<CheckRow> check_model(const CheckOptions& options);

}  // namespace fovea
