// SPDX-License-Identifier: Apache-2.0
#include "bench/ceilings.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "bench/clock.h"
#include "fovea/device.h"

namespace fovea::bench {
namespace {

// Larger than all last-level caches. A sample reads a part of it.
constexpr size_t kStreamBytes = size_t{1} << 30;
constexpr size_t kParts = 4;
constexpr int kRounds = 5;
constexpr int64_t kFmaLoops = 4'000'000;
constexpr int kChains = 12;  // independent accumulators: latency 4 x 2 ports, and a reserve

template <int kLanes>
struct Vector {
  using Type __attribute__((vector_size(kLanes * 4))) = float;
};

// One body for all widths: the caller's target attribute determines the instructions.
template <typename V>
__attribute__((always_inline)) inline double fma_flops(int64_t loops, float& sink) {
  V chains[kChains];
  for (int c = 0; c < kChains; ++c) chains[c] = V{} + static_cast<float>(c);
  V factor = V{} + 0.999999f;
  V addend = V{} + 1e-6f;
  asm volatile("" : "+x"(factor), "+x"(addend));
  for (int64_t i = 0; i < loops; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chains[c] = chains[c] * factor + addend;
  }
  for (int c = 0; c < kChains; ++c) sink += chains[c][0];
  return 2.0 * kChains * static_cast<double>(sizeof(V) / sizeof(float)) *
         static_cast<double>(loops);
}

template <typename V>
__attribute__((always_inline)) inline float read_all(const float* data, size_t count) {
  constexpr size_t kLanes = sizeof(V) / sizeof(float);
  V sums[8] = {};
  for (size_t i = 0; i + 8 * kLanes <= count; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (size_t u = 0; u < 8; ++u) sums[u] += *reinterpret_cast<const V*>(data + i + u * kLanes);
  }
  float sum = 0;
  for (const V& part : sums) sum += part[0];
  return sum;
}

#if defined(__x86_64__)
using V512 = Vector<16>::Type;
using V256 = Vector<8>::Type;
__attribute__((target("avx512f,fma,prefer-vector-width=512"))) double fma_avx512(int64_t n,
                                                                                 float& s) {
  return fma_flops<V512>(n, s);
}
__attribute__((target("avx2,fma"))) double fma_avx2(int64_t n, float& s) {
  return fma_flops<V256>(n, s);
}
__attribute__((target("avx512f"))) float read_avx512(const float* d, size_t n) {
  return read_all<V512>(d, n);
}
__attribute__((target("avx2"))) float read_avx2(const float* d, size_t n) {
  return read_all<V256>(d, n);
}
#endif
using V128 = Vector<4>::Type;
double fma_baseline(int64_t n, float& s) { return fma_flops<V128>(n, s); }
float read_baseline(const float* d, size_t n) { return read_all<V128>(d, n); }

struct Probes {
  double (*fma)(int64_t, float&) = fma_baseline;
  float (*read)(const float*, size_t) = read_baseline;
};

Probes widest() {
#if defined(__x86_64__)
  const DeviceInfo device = cpu_device();
  if (device.isa == "avx512") return {fma_avx512, read_avx512};
  if (device.isa == "avx2") return {fma_avx2, read_avx2};
#endif
  return {};
}

}  // namespace

// Uses pages of 2 MiB like KV pools, which can be read at a higher bandwidth.
CeilingProbe::CeilingProbe(ThreadPool& threads)
    : threads_(threads),
      memory_(kStreamBytes, "the memory to read"),
      sinks_(static_cast<size_t>(threads.size())) {
  const std::span<float> stream(reinterpret_cast<float*>(memory_.data()),
                                kStreamBytes / sizeof(float));
  std::fill(stream.begin(), stream.end(), 1.0f);
}

Ceilings CeilingProbe::sample() {
  const Ceilings sampled = {flops(), read_bytes()};
  // Prevents the compiler from removing the loops.
  volatile float keep = 0;
  for (const float sink : sinks_) keep = keep + sink;
  return sampled;
}

double CeilingProbe::flops() {
  const Probes probes = widest();
  std::vector<double> counts(sinks_.size());
  const double start = now();
  threads_.parallel_for(threads_.size(), [&](int64_t i, int) {
    counts[static_cast<size_t>(i)] = probes.fma(kFmaLoops, sinks_[static_cast<size_t>(i)]);
  });
  const double seconds = now() - start;
  return std::accumulate(counts.begin(), counts.end(), 0.0) / seconds;
}

double CeilingProbe::read_bytes() {
  const Probes probes = widest();
  constexpr size_t kPartFloats = kStreamBytes / kParts / sizeof(float);
  const float* part = reinterpret_cast<const float*>(memory_.data()) + next_part_ * kPartFloats;
  next_part_ = (next_part_ + 1) % kParts;
  constexpr size_t kLineFloats = 16;
  const size_t each = kPartFloats / sinks_.size() / kLineFloats * kLineFloats;
  const double start = now();
  threads_.parallel_for(threads_.size(), [&](int64_t i, int) {
    const auto thread = static_cast<size_t>(i);
    sinks_[thread] += probes.read(part + thread * each, each);
  });
  return static_cast<double>(each * sinks_.size() * sizeof(float)) / (now() - start);
}

Ceilings measure_ceilings(ThreadPool& threads) {
  CeilingProbe probe(threads);
  Ceilings best;
  for (int round = 0; round < kRounds; ++round) {
    const Ceilings sampled = probe.sample();
    best.flops = std::max(best.flops, sampled.flops);
    best.read_bytes = std::max(best.read_bytes, sampled.read_bytes);
  }
  return best;
}

}  // namespace fovea::bench
