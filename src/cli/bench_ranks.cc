// SPDX-License-Identifier: Apache-2.0
// The command `bench ranks`.
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/gpu_ranks.h"
#include "cli/bench_gpu.h"
#include "cli/commands.h"

namespace fovea::cli {
namespace {

struct RankFlags {
  bench::RankBenchOptions options;
  std::string output = "md";
};

// Times that were not measured are null.
nlohmann::ordered_json figure(double microseconds) {
  if (microseconds < 0) return nullptr;
  return microseconds;
}

void run(const RankFlags& flags) {
  const bench::RankFigures figures = bench::measure_ranks(flags.options);
  if (flags.output == "json") {
    nlohmann::ordered_json rows = nlohmann::json::array();
    for (const bench::RankSumTime& time : figures.times) {
      rows.push_back({{"bytes", time.bytes},
                      {"nccl_us", figure(time.nccl)},
                      {"sums_us", figure(time.sums)},
                      {"gather_us", figure(time.gather)}});
    }
    const nlohmann::ordered_json all = {
        {"ranks", flags.options.ranks}, {"copy_gbps", figures.copy_gbps}, {"times", rows}};
    fmt::print("{}\n", all.dump(2));
    return;
  }
  const auto cell = [](double microseconds) {
    return microseconds < 0 ? std::string("-") : fmt::format("{:.2f}", microseconds);
  };
  fmt::print("{} ranks; copies from GPU to GPU: {:.1f} GB/s\n\n", flags.options.ranks,
             figures.copy_gbps);
  fmt::print("| bytes of a rank | sum, NCCL, us | sum, own, us | gather, NCCL, us |\n");
  fmt::print("| ---: | ---: | ---: | ---: |\n");
  for (const bench::RankSumTime& time : figures.times) {
    fmt::print("| {} | {} | {} | {} |\n", time.bytes, cell(time.nccl), cell(time.sums),
               cell(time.gather));
  }
}

}  // namespace

void add_bench_ranks(CLI::App& bench) {
  auto flags = std::make_shared<RankFlags>();
  CLI::App* command = bench.add_subcommand(
      "ranks", "measure sums over several GPUs, by NCCL and by kernels of Fovea");
  command->add_option("--ranks", flags->options.ranks, "GPUs, from the first on")
      ->capture_default_str()
      ->check(CLI::Range(2, 64));
  command->add_option("--output,-o", flags->output, "md or json")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json"}));
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
