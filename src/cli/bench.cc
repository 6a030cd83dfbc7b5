// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <memory>

#include "bench/attention_suite.h"
#include "cli/commands.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

struct BenchFlags {
  std::string output = "md";
  std::string backend = "auto";
  std::string phase;
  std::vector<int> threads;
  double seconds = 1;
  bool quick = false;
};

void run(const BenchFlags& flags) {
  if (flags.output != "md" && flags.output != "csv" && flags.output != "json") {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--output is '{}', known: md, csv, json", flags.output));
  }
  std::string report;
  for (const int count : flags.threads.empty() ? std::vector<int>{0} : flags.threads) {
    ThreadPool threads(count);
    show_progress("measuring this machine's ceilings");
    const bench::Ceilings ceilings = bench::measure_ceilings(threads);
    std::vector<bench::AttentionResult> results;
    for (const bench::AttentionCase& config : bench::default_cases(flags.quick)) {
      if (!flags.phase.empty() && config.phase != flags.phase) continue;
      results.push_back(bench::run_attention_case(config, ceilings, threads,
                                                  {.backend = flags.backend,
                                                   .seconds_per_case = flags.seconds,
                                                   .progress = show_progress}));
    }
    report += flags.output == "md"    ? bench::to_markdown(results, ceilings)
              : flags.output == "csv" ? bench::to_csv(results, ceilings)
                                      : bench::to_json(results, ceilings);
  }
  clear_progress();
  fmt::print("{}", report);
}

}  // namespace

void add_bench(CLI::App& program) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command = program.add_subcommand("bench", "measure");
  command->require_subcommand(1);
  CLI::App* attention = command->add_subcommand(
      "attention", "attention over paged caches, as fractions of this machine's ceilings");
  attention->add_option("--output,-o", flags->output, "md, csv or json")->capture_default_str();
  attention->add_option("--backend", flags->backend, "auto or NAME")->capture_default_str();
  attention->add_option("--phase", flags->phase, "only prefill or only decode");
  attention->add_option("--threads", flags->threads, "comma-separated counts; default one per core")
      ->delimiter(',');
  attention->add_option("--seconds", flags->seconds, "per case")->capture_default_str();
  attention->add_flag("--quick", flags->quick, "small cases only");
  attention->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
