// SPDX-License-Identifier: Apache-2.0
// Common code of the CPU micro-benchmarks: the threads, rates as fractions of this machine's
// ceilings, and the best of ten repetitions.
#pragma once

#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include "bench/ceilings.h"

namespace fovea::bench {

inline ThreadPool& threads() {
  static ThreadPool pool;
  return pool;
}

inline const Ceilings& ceilings() {
  static const Ceilings measured = measure_ceilings(threads());
  return measured;
}

// Sets counters for rates over the time of one iteration, and for their fraction of a ceiling.
inline void report(benchmark::State& state, double flops, double bytes) {
  const auto rate = benchmark::Counter::kIsIterationInvariantRate;
  state.counters["gflop"] = benchmark::Counter(flops * 1e-9, rate);
  state.counters["gbyte"] = benchmark::Counter(bytes * 1e-9, rate);
  state.counters["of_flops"] = benchmark::Counter(flops / ceilings().flops, rate);
  state.counters["of_bytes"] = benchmark::Counter(bytes / ceilings().read_bytes, rate);
}

// Reports the time in the line _min and the rates in the line _max.
inline void best_of_ten(benchmark::internal::Benchmark* bench) {
  bench->Repetitions(10)->ReportAggregatesOnly()->UseRealTime();
  bench->ComputeStatistics("min", [](const std::vector<double>& values) {
    return *std::min_element(values.begin(), values.end());
  });
  bench->ComputeStatistics("max", [](const std::vector<double>& values) {
    return *std::max_element(values.begin(), values.end());
  });
}

}  // namespace fovea::bench
