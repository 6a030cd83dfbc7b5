// SPDX-License-Identifier: Apache-2.0
// The GPU part of `fovea bench`.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/attention_suite.h"

namespace fovea::cli {

struct GpuBenchFlags {
  std::string device = "cpu";  // "cpu", "cuda" or "cuda:N"
  std::string suite = "table";
  std::vector<std::string> filters;
  std::vector<std::string> states = {"burst"};
  bool peers = false;
  std::string peer_kinds = "cudnn,flash,flex";
  std::string peers_script = "bench/peers/cuda_attention_peers.py";
  std::optional<std::string> baselines;
  std::optional<std::string> save;

  bool on_gpu() const { return device != "cpu"; }
};

void add_gpu_options(CLI::App& attention, GpuBenchFlags& flags);
void add_gpu_ceilings(CLI::App& bench);
void add_bench_products(CLI::App& bench);
void add_bench_ranks(CLI::App& bench);

// Runs the suite, or only `one_case` if given. Prints Markdown, CSV or JSON according to `output`.
// The exit code is 1 if an output was wrong.
void run_gpu_bench(const GpuBenchFlags& flags, const std::string& backend,
                   const std::string& output, const std::optional<bench::AttentionCase>& one_case);

}  // namespace fovea::cli
