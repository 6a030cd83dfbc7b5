// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_timing.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <optional>
#include <thread>
#include <vector>

#include "bench/clock.h"
#include "gpu/gpu.h"

namespace fovea::bench {
namespace {

constexpr double kGraphBelow = 400e-6;
constexpr auto kIdle = std::chrono::milliseconds(300);
constexpr double kWarmUp = 4e-3;  // until clocks have risen from idle
// A GPU holds its burst clocks only for tens of milliseconds of matrix products. Warm-up and
// measurement must fit.
constexpr double kBurst = 30e-3;
constexpr double kSustained = 1.5;
constexpr size_t kMinSamples = 7;
// Calls per graph: enough to hide its launch, and few enough to instantiate the graph quickly.
constexpr int32_t kMinCalls = 8;
constexpr int32_t kMaxCalls = 256;

struct Interval {
  gpu::Event begin, end;
  double seconds() const { return end.milliseconds_since(begin) * 1e-3; }
};

// Returns the number of samples of `each` seconds that fill `window`.
size_t samples_in(double window, double each, size_t min_samples) {
  return std::max(min_samples, static_cast<size_t>(std::ceil(window / each)));
}

// Runs `sample` repeatedly and returns the GPU time of each. Several samples are in flight, so that
// the GPU's queue never becomes empty.
template <typename Sample>
std::vector<double> repeat(Sample&& sample, size_t count, Stream stream) {
  std::array<Interval, 8> flights;
  std::vector<double> seconds;
  const auto land = [&] {
    Interval& first = flights[seconds.size() % flights.size()];
    first.end.wait();
    seconds.push_back(first.seconds());
  };
  for (size_t issued = 0; issued < count; ++issued) {
    if (issued - seconds.size() == flights.size()) land();
    Interval& flight = flights[issued % flights.size()];
    flight.begin.record(stream);
    sample();
    flight.end.record(stream);
  }
  while (seconds.size() < count) land();
  return seconds;
}

}  // namespace

std::string_view power_state_name(PowerState state) {
  return state == PowerState::burst ? "burst" : "sustained";
}

double eager_seconds(const GpuWork& work, Stream stream) {
  constexpr int32_t kCalls = 32;
  Interval interval;
  // The first call of each layer builds its graph.
  for (int32_t turn = 0; turn < kCalls; ++turn) work(turn, stream);
  interval.begin.record(stream);
  for (int32_t turn = 0; turn < kCalls; ++turn) work(turn, stream);
  interval.end.record(stream);
  interval.end.wait();
  return interval.seconds() / kCalls;
}

double host_seconds(const GpuWork& work, Stream stream) {
  constexpr int32_t kCalls = 32;
  std::vector<double> seconds;
  for (int round = 0; round < 5; ++round) {
    gpu::synchronize(stream);
    const double start = now();
    for (int32_t turn = 0; turn < kCalls; ++turn) work(turn, stream);
    seconds.push_back((now() - start) / kCalls);
  }
  gpu::synchronize(stream);
  return median(seconds);
}

double graph_seconds(const GpuWork& work, Stream stream) {
  constexpr int32_t kCalls = 64;
  const gpu::Graph graph = gpu::Graph::capture(stream, [&](Stream captured) {
    for (int32_t turn = 0; turn < kCalls; ++turn) work(turn, captured);
  });
  const auto replay = [&] { graph.launch(stream); };
  const double each = repeat(replay, 2, stream).back();
  repeat(replay, samples_in(kWarmUp, each, 1), stream);
  return median(repeat(replay, samples_in(kWarmUp, each, kMinSamples), stream)) / kCalls;
}

GpuTime time_on_gpu(const GpuWork& work, int32_t sets, PowerState state, Stream stream) {
  int32_t turn = 0;
  for (; turn < 2; ++turn) work(turn, stream);
  Interval probe;
  probe.begin.record(stream);
  for (int i = 0; i < 2; ++i) work(turn++, stream);
  probe.end.record(stream);
  probe.end.wait();
  const double call = probe.seconds() / 2;
  GpuTime time;
  time.graph = call < kGraphBelow;
  const bool burst = state == PowerState::burst;
  // All samples must fit into the burst. Otherwise the median mixes times at two clocks.
  const double fitting = burst ? kBurst / (kMinSamples * call) : kMaxCalls;
  const double wanted = std::min<double>(sets, fitting);
  const int32_t calls =
      time.graph ? static_cast<int32_t>(std::clamp<double>(wanted, kMinCalls, kMaxCalls)) : 1;
  std::optional<gpu::Graph> graph;
  if (time.graph) {
    graph = gpu::Graph::capture(stream, [&](Stream captured) {
      for (int32_t i = 0; i < calls; ++i) work(i, captured);
    });
  }
  const auto sample = [&] {
    if (graph) {
      graph->launch(stream);
    } else {
      work(turn++, stream);
    }
  };
  gpu::synchronize(stream);
  if (burst) std::this_thread::sleep_for(kIdle);
  const double each = median(repeat(sample, samples_in(kWarmUp, call * calls, 1), stream));
  const std::vector<double> seconds =
      repeat(sample, samples_in(burst ? kBurst : kSustained, each, kMinSamples), stream);
  time.samples = static_cast<int>(seconds.size());
  time.seconds = median(seconds) / calls;
  time.seconds_min = *std::ranges::min_element(seconds) / calls;
  return time;
}

}  // namespace fovea::bench
