// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <iostream>
#include <memory>
#include <string>

#include "bench/attention_suite.h"
#include "cli/bench_engine.h"
#include "cli/bench_gpu.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

struct BenchFlags {
  std::string output = "md";
  std::string backend = "auto";
  bench::AttentionCase config;  // used if --kv-len is given
  std::string phase;
  std::optional<std::string> dtype, kv_dtype;  // default fp32, or bf16 on a GPU
  bool one_case = false;
  std::vector<int> threads;
  double seconds = 1;
  bool quick = false;
  bool turns = false;
  GpuBenchFlags gpu;
};

bench::AttentionCase one_case(const BenchFlags& flags) {
  bench::AttentionCase config = flags.config;
  const std::string dtype = flags.gpu.on_gpu() ? "bf16" : "fp32";
  config.phase = !flags.phase.empty()            ? flags.phase
                 : config.q_len == 1             ? "decode"
                 : config.q_len == config.kv_len ? "prefill"
                                                 : "extend";
  config.q_dtype = parse_dtype_flag("--dtype", flags.dtype.value_or(dtype));
  config.kv_dtype = parse_dtype_flag("--kv-dtype", flags.kv_dtype.value_or(dtype));
  if (config.q_len > config.kv_len) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("--q-len is {}, must be in [1, --kv-len {}]", config.q_len, config.kv_len));
  }
  return config;
}

std::vector<bench::AttentionCase> chosen_cases(const BenchFlags& flags) {
  if (flags.one_case) return {one_case(flags)};
  std::vector<bench::AttentionCase> cases = bench::default_cases(flags.quick);
  if (!flags.phase.empty()) {
    std::erase_if(cases, [&](const auto& config) { return config.phase != flags.phase; });
  }
  return cases;
}

// Refuses flags that would have no effect.
void check_applicable(const CLI::App& command, const BenchFlags& flags) {
  const auto refuse = [&](std::initializer_list<const char*> options, const char* why) {
    for (const char* option : options) {
      if (command.get_option(option)->count() == 0) continue;
      throw Error(ErrorCode::invalid_argument, fmt::format("{} {}", option, why));
    }
  };
  if (flags.gpu.on_gpu()) {
    refuse({"--threads", "--seconds", "--quick", "--turns"}, "is for --device cpu");
    if (!flags.one_case) refuse({"--phase"}, "needs --kv-len on a GPU; --filter chooses cases");
  } else {
    refuse({"--suite", "--filter", "--state", "--peers", "--baselines", "--save"},
           "needs --device cuda");
  }
  if (flags.turns) {
    refuse({"--seconds"}, "does not end a case whose rounds --turns asks for");
    if (flags.threads.size() > 1) refuse({"--threads"}, "takes one count with --turns");
  }
  if (flags.one_case) {
    refuse({"--suite", "--filter", "--quick"}, "chooses among given cases, --kv-len makes its own");
  }
}

void run(const BenchFlags& flags) {
  if (std::isnan(flags.seconds)) {  // CLI11's range check accepts NaN
    throw Error(ErrorCode::invalid_argument, "--seconds is nan, must be in [0, 3600]");
  }
  if (flags.gpu.on_gpu()) {
    run_gpu_bench(flags.gpu, flags.backend, flags.output,
                  flags.one_case ? std::optional(one_case(flags)) : std::nullopt);
    return;
  }
  bench::AttentionBenchOptions options{
      .backend = flags.backend, .seconds_per_case = flags.seconds, .progress = show_progress};
  if (flags.turns) {
    options.wait_for_turn = [line = std::string()]() mutable {
      return static_cast<bool>(std::getline(std::cin, line));
    };
    options.end_turn = [](double seconds) {
      fmt::print("{:.6e}\n", seconds);
      std::fflush(stdout);
    };
  }
  std::optional<InterruptCatcher> catcher;
  if (!flags.turns) catcher.emplace();  // turns wait for stdin, where the default handler must act
  std::vector<bench::AttentionResult> results;
  for (const int count : flags.threads.empty() ? std::vector<int>{0} : flags.threads) {
    ThreadPool threads(count);
    show_progress("measuring this machine's ceilings");
    bench::CeilingProbe probe(threads);
    for (const bench::AttentionCase& config : chosen_cases(flags)) {
      results.push_back(bench::run_attention_case(config, probe, threads, options));
      if (InterruptCatcher::caught() != 0) break;
    }
    if (InterruptCatcher::caught() != 0) break;
  }
  clear_progress();
  fmt::print("{}", flags.output == "md"    ? bench::to_markdown(results)
                   : flags.output == "csv" ? bench::to_csv(results)
                                           : bench::to_json(results));
  end_if_interrupted();
}

}  // namespace

void add_bench(CLI::App& program) {
  auto flags = std::make_shared<BenchFlags>();
  CLI::App* command =
      program.add_subcommand("bench", "measure speed and compare it with the machine's ceilings");
  command->require_subcommand(1);
  add_gpu_ceilings(*command);
  CLI::App* attention = command->add_subcommand(
      "attention", "measure attention over paged caches against the machine's ceilings");
  attention
      ->add_option("--output,-o", flags->output, "md, csv or json (an array for several --state)")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "csv", "json"}));
  attention->add_option("--backend", flags->backend, "auto, NAME, or prefer:NAME")
      ->capture_default_str();
  attention
      ->add_option("--phase", flags->phase,
                   "only cases of this phase; with --kv-len, the phase of the case")
      ->check(CLI::IsMember({"prefill", "extend", "decode"}));
  bench::AttentionCase& config = flags->config;
  CLI::Validator positive = CLI::Range(1, 1 << 24);
  positive.description("");  // hides the range in every line of the help
  CLI::Option* kv_len = attention
                            ->add_option("--kv-len", config.kv_len,
                                         "measure one case with this many keys per request")
                            ->check(positive);
  const auto add_size = [&](const char* flag, int32_t& value, const char* of) {
    attention->add_option(flag, value, of)->capture_default_str()->check(positive)->needs(kv_len);
  };
  add_size("--q-len", config.q_len, "new tokens of a request");
  add_size("--batch", config.batch, "requests");
  add_size("--q-heads", config.q_heads, "heads of q");
  add_size("--kv-heads", config.kv_heads, "heads of k and v");
  add_size("--head-dim", config.head_dim, "values of a head");
  add_size("--page-size", config.page_size, "tokens of a page");
  attention
      ->add_option("--dtype", flags->dtype,
                   "dtype of q, new k and v, and out; default fp32, on a GPU bf16")
      ->needs(kv_len);
  attention
      ->add_option("--kv-dtype", flags->kv_dtype, "dtype of the cache; default fp32, on a GPU bf16")
      ->needs(kv_len);
  add_comma_list(*attention, "--threads", flags->threads,
                 "on the CPU: comma-separated counts; default one per core");
  attention->add_option("--seconds", flags->seconds, "on the CPU: seconds per case")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 3600.0));
  attention->add_flag("--quick", flags->quick, "on the CPU: small cases only");
  attention
      ->add_flag(
          "--turns", flags->turns,
          "on the CPU: replace --seconds by one round of calls for each line of stdin; print "
          "the median seconds of each round, and the report at the end")
      ->needs(kv_len);
  add_gpu_options(*attention, flags->gpu);
  attention->footer(
      "SIGINT (Ctrl-C) and SIGTERM end the command after the current case and print the measured "
      "cases.");
  attention->callback([attention, flags, kv_len] {
    flags->one_case = kv_len->count() > 0;
    check_applicable(*attention, *flags);
    run(*flags);
  });
  add_bench_engine(*command);
  add_bench_products(*command);
  add_bench_ranks(*command);
}

}  // namespace fovea::cli
