// SPDX-License-Identifier: Apache-2.0
// Times attention backends on paged caches with cold data, verifies the output, and relates results
// to this machine's ceilings.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "bench/ceilings.h"
#include "fovea/dtype.h"
#include "fovea/select_backend.h"

namespace fovea::bench {

struct AttentionCase {
  std::string phase;  // "prefill" (causal over its own tokens), "extend" or "decode"
  int32_t batch = 1;
  int32_t q_heads = 32, kv_heads = 8, head_dim = 128;
  int32_t q_len = 1;   // new tokens of each request
  int32_t kv_len = 1;  // tokens of each request, including new ones
  int32_t page_size = 16;
  DType q_dtype = DType::f32;
  DType kv_dtype = DType::f32;

  double flops() const;  // 4 * head_dim per visible (query, key, q head)
  double bytes() const;  // keys and values once, q and out once
};

struct AttentionResult {
  AttentionCase config;
  std::string backend;
  int threads = 1;
  double seconds = 0;  // median of one forward(), which also stores the new keys
  double seconds_min = 0;
  double plan_seconds = 0;  // one plan(), which all layers of a pass share
  // Fraction of the binding ceiling: max(flops / peak, bytes / bandwidth) / seconds. It is the
  // median over rounds, each of which runs several calls between two samples of the ceilings.
  double fraction = 0;
  bool compute_bound = false;
  Ceilings ceilings;  // medians of those samples
  double error = 0;   // ||out - reference|| / ||reference|| over sampled rows, fp64 reference
};

// Returns prefill with D 64 and 128 and 1k to 8k tokens, and decode with batch 1 to 32, 1k to 16k
// tokens, and fp32, bf16 and fp8 caches. `quick` selects a small case of each kind.
std::vector<AttentionCase> default_cases(bool quick);

struct AttentionBenchOptions {
  std::string backend = "auto";
  double seconds_per_case = 1;
  // If set, waits before each round; returning false ends the case, instead of seconds_per_case.
  std::function<bool()> wait_for_turn;
  std::function<void(double seconds)> end_turn;  // receives the median of each round
  std::function<void(std::string_view)> progress;
};

// Runs a case. Throws Error{unsupported} with the reasons if the backend refuses it. Throws if the
// output is wrong, so that wrong results are never timed.
AttentionResult run_attention_case(const AttentionCase& config, CeilingProbe& probe,
                                   ThreadPool& threads, const AttentionBenchOptions& options);

std::string to_markdown(const std::vector<AttentionResult>& results);
std::string to_csv(const std::vector<AttentionResult>& results);
std::string to_json(const std::vector<AttentionResult>& results);

}  // namespace fovea::bench
