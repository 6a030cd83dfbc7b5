// SPDX-License-Identifier: Apache-2.0
#include "bench/attention_suite.h"

#include <fmt/core.h>

#include <algorithm>
#include <stdexcept>

#include "bench/attention_workload.h"
#include "bench/clock.h"
#include "fovea/error.h"

namespace fovea::bench {
namespace {

constexpr double kRoundSeconds = 0.01;  // as long as a sample of the ceilings
constexpr size_t kMinRounds = 5;
// Far above the error from rounding inputs (fp8: 2^-4 per element, averaged), far below any bug.
constexpr double kWrong = 0.1;

// Runs rounds of calls between samples of the ceilings.
void measure(Workload& workload, CeilingProbe& probe, const AttentionBenchOptions& options,
             AttentionResult& result) {
  std::vector<double> times, flops, read_bytes, compute, memory;
  const double end = now() + options.seconds_per_case;
  const auto next_round = [&] {
    if (options.wait_for_turn) return options.wait_for_turn();
    return now() < end || memory.size() < kMinRounds;
  };
  Ceilings before = probe.sample();
  int32_t layer = 0;
  while (next_round()) {
    // Other programs have run since the last sample.
    if (options.wait_for_turn) before = probe.sample();
    std::vector<double> round;
    for (const double round_end = now() + kRoundSeconds; round.empty() || now() < round_end;) {
      layer = (layer + 1) % workload.layers();
      const double start = now();
      workload.forward(layer);
      round.push_back(now() - start);
    }
    const Ceilings after = probe.sample();
    flops.push_back((before.flops + after.flops) / 2);
    read_bytes.push_back((before.read_bytes + after.read_bytes) / 2);
    before = after;
    compute.push_back(result.config.flops() / flops.back() / median(round));
    memory.push_back(result.config.bytes() / read_bytes.back() / median(round));
    times.insert(times.end(), round.begin(), round.end());
    if (options.end_turn) options.end_turn(median(round));
  }
  if (times.empty()) throw Error(ErrorCode::invalid_argument, "no round was requested");
  result.seconds = median(times);
  result.seconds_min = *std::min_element(times.begin(), times.end());
  result.compute_bound = median(compute) > median(memory);
  result.fraction = median(result.compute_bound ? compute : memory);
  result.ceilings = {median(flops), median(read_bytes)};
}

}  // namespace

double AttentionCase::flops() const {
  const double prefix = kv_len - q_len;
  const double pairs = q_len * prefix + 0.5 * q_len * (q_len + 1.0);
  return 4.0 * head_dim * pairs * q_heads * batch;
}

double AttentionCase::bytes() const {
  const double kv =
      2.0 * batch * kv_len * kv_heads * head_dim * static_cast<double>(dtype_bytes(kv_dtype));
  const double qo =
      2.0 * batch * q_len * q_heads * head_dim * static_cast<double>(dtype_bytes(q_dtype));
  return kv + qo;
}

std::vector<AttentionCase> default_cases(bool quick) {
  std::vector<AttentionCase> cases;
  for (const int32_t dim : {64, 128}) {
    for (const int32_t length : {1024, 2048, 4096, 8192}) {
      if (quick && length > 1024) continue;
      AttentionCase prefill;
      prefill.phase = "prefill";
      prefill.head_dim = dim;
      prefill.q_len = prefill.kv_len = length;
      cases.push_back(prefill);
    }
  }
  for (const DType kv_dtype : {DType::f32, DType::bf16, DType::f8e4m3}) {
    for (const int32_t batch : {1, 8, 32}) {
      for (const int32_t length : {1024, 4096, 16384}) {
        if (quick && (batch > 1 || length > 4096)) continue;
        AttentionCase decode;
        decode.phase = "decode";
        decode.batch = batch;
        decode.kv_len = length;
        decode.kv_dtype = kv_dtype;
        // A bf16 model has bf16 activations; fp8 caches work with either dtype.
        if (kv_dtype == DType::bf16) decode.q_dtype = DType::bf16;
        cases.push_back(decode);
      }
    }
  }
  return cases;
}

AttentionResult run_attention_case(const AttentionCase& config, CeilingProbe& probe,
                                   ThreadPool& threads, const AttentionBenchOptions& options) {
  if (options.progress) {
    options.progress(fmt::format("{} batch {} q {} kv {} dim {} {}", config.phase, config.batch,
                                 config.q_len, config.kv_len, config.head_dim,
                                 dtype_name(config.kv_dtype)));
  }
  Workload workload(config, threads, options.backend);
  AttentionResult result;
  result.config = config;
  result.backend = workload.backend();
  result.threads = threads.size();
  const double plan_start = now();
  workload.plan();
  result.plan_seconds = now() - plan_start;
  workload.forward(0);
  result.error = workload.error();
  if (!(result.error < kWrong)) {
    throw std::runtime_error(
        fmt::format("backend {}: wrong output, relative error {}", result.backend, result.error));
  }
  measure(workload, probe, options, result);
  return result;
}

}  // namespace fovea::bench
