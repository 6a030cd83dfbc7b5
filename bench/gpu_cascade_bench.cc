// SPDX-License-Identifier: Apache-2.0
// Compares three ways to decode requests that share a prefix: reading it for each request, reading
// it once regardless of savings, and the default of BatchLimits::min_prefix_savings. The default is
// chosen by these results. Arguments: kv dtype (bf16, e4m3), q heads, kv heads, page size.
#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "bench/gpu_workload.h"
#include "fovea/error.h"
#include "fovea/gpu.h"

namespace fovea::bench {
namespace {

constexpr size_t kMemory = size_t{24} << 30;
constexpr double kWindow = 2e-3;

struct Shape {
  int32_t requests, shared, own;
  int32_t sharers = 0;  // requests per group; 0 for all
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const int32_t requests : {2, 4, 8, 16, 32, 64, 128, 256}) {
    for (const int32_t shared : {256, 512, 1024, 2048, 4096, 16384, 65536}) {
      if (int64_t{requests} * shared <= 1 << 22) all.push_back({requests, shared, 512});
    }
  }
  for (const int32_t sharers : {2, 4, 16}) {
    for (const int32_t shared : {512, 2048, 8192}) all.push_back({64, shared, 512, sharers});
  }
  for (const int32_t shared : {1024, 4096, 16384}) all.push_back({16, shared, 4096});
  for (const int32_t shared : {1024, 4096, 16384}) all.push_back({64, shared, 2048});
  return all;
}

// Returns seconds of one forward() in a graph of calls that rotate over cold caches.
double seconds_of(GpuWorkload& workload, Stream stream) {
  const auto graph_of = [&](int32_t calls) {
    return gpu::Graph::capture(stream, [&](Stream captured) {
      for (int32_t turn = 0; turn < calls; ++turn) workload.forward(turn, captured);
    });
  };
  gpu::Event begin, end;
  const auto time = [&](const gpu::Graph& graph) {
    begin.record(stream);
    graph.launch(stream);
    end.record(stream);
    end.wait();
    return end.milliseconds_since(begin) * 1e-3;
  };
  const gpu::Graph few = graph_of(4);
  time(few);
  const auto calls = static_cast<int32_t>(std::clamp(kWindow / (time(few) / 4), 4.0, 64.0));
  const gpu::Graph graph = graph_of(calls);
  time(graph);
  std::vector<double> seconds(5);
  for (double& each : seconds) each = time(graph) / calls;
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

// Returns microseconds, or a negative value if the output is wrong.
double run(const GpuCase& config, MeasureKernels& kernels, CacheMemory& memory, Stream stream) {
  GpuWorkload workload(config, {}, kernels, memory, stream);
  workload.plan(stream);
  const bool right = workload.check(0, stream).problem.empty();
  const double us = seconds_of(workload, stream) * 1e6;
  return right && workload.check(1, stream).problem.empty() ? us : -us;
}

void run_all(const std::vector<std::string>& arguments) {
  const auto argument = [&](size_t i, const char* other) {
    return arguments.size() > i ? arguments[i] : std::string(other);
  };
  GpuCase config;
  config.phase = "decode-shared";
  config.kv_dtype = parse_dtype(argument(0, "bf16")).value();
  config.spec = {.q_heads = std::stoi(argument(1, "32")),
                 .kv_heads = std::stoi(argument(2, "8")),
                 .head_dim = 128,
                 .head_dim_v = 128};
  config.spec.q_dtype = DType::bf16;
  config.page_size = std::stoi(argument(3, "64"));
  const gpu::Context context(0);
  MeasureKernels kernels(context);
  CacheMemory memory;
  memory.values = gpu::DeviceBuffer(kMemory);
  memory.scales = gpu::DeviceBuffer(kMemory / 16);
  const gpu::OwnedStream stream;
  fmt::print("{} {}/{} page {}\n", argument(0, "bf16"), config.spec.q_heads, config.spec.kv_heads,
             config.page_size);
  fmt::print("| requests x shared + own | keys saved | separate | cascade | default |\n");
  const auto every = static_cast<size_t>(std::stoi(argument(4, "1")));
  const std::vector<Shape> all = shapes();
  for (size_t n = 0; n < all.size(); n += every) {
    const Shape& shape = all[n];
    config.requests.assign(static_cast<size_t>(shape.requests), {1, shape.shared + shape.own});
    config.shared_prefix = shape.shared;
    config.sharers = shape.sharers;
    const int32_t groups = shape.sharers > 0 ? shape.requests / shape.sharers : 1;
    double us[3];
    for (int i = 0; i < 3; ++i) {
      config.prefix_levels = i > 0 ? 1 : 0;
      config.min_prefix_savings = i == 1 ? 1 : BatchLimits{}.min_prefix_savings;
      us[i] = run(config, kernels, memory, stream.get());
    }
    fmt::print("| {}x{}+{}{} | {} | {:.1f} | {:.1f} | {:.1f} |\n", shape.requests, shape.shared,
               shape.own, shape.sharers > 0 ? fmt::format(" by {}", shape.sharers) : "",
               int64_t{shape.requests - groups} * shape.shared, us[0], us[1], us[2]);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace fovea::bench

int main(int count, char** arguments) {
  try {
    fovea::bench::run_all({arguments + 1, arguments + count});
  } catch (const fovea::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
