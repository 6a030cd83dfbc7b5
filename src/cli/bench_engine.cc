// SPDX-License-Identifier: Apache-2.0
// The command `bench engine`, which measures how long concurrent requests wait for their tokens.
#include "cli/bench_engine.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "fovea/engine.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct EngineBenchFlags {
  EngineFlags engine;
  std::string output = "md";
  int32_t requests = 8;
  int32_t input_len = 512;
  int32_t output_len = 64;
  uint64_t seed = 0;
};

double milliseconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

// Returns the value at the fraction `share` of the sorted values, or 0 without values.
double percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1))];
}

std::vector<GenerateRequest> make_requests(const EngineBenchFlags& flags, const Engine& engine) {
  if (flags.input_len + int64_t{flags.output_len} > engine.max_context()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--input-len is {} and --output-len {}, but the context has {} tokens",
                            flags.input_len, flags.output_len, engine.max_context()));
  }
  std::mt19937_64 random(flags.seed);
  std::vector<GenerateRequest> requests(static_cast<size_t>(flags.requests));
  for (GenerateRequest& request : requests) {
    request.sampling.max_new_tokens = flags.output_len;
    request.sampling.ignore_eos = true;
    for (int32_t i = 0; i < flags.input_len; ++i) {
      const auto token = random() % static_cast<uint64_t>(engine.vocabulary());
      request.tokens.push_back(static_cast<int32_t>(token));
    }
  }
  return requests;
}

// Returns the arrival time of each token of each request, in milliseconds since the requests were
// added.
std::vector<std::vector<double>> run_requests(Engine& engine,
                                              const std::vector<GenerateRequest>& requests) {
  std::vector<std::vector<double>> arrivals(requests.size());
  const Clock::time_point start = Clock::now();
  const std::vector<GenerateResult> results = engine.generate(
      requests,
      [&](const TokenEvent& event) {
        if (event.token < 0) return;
        arrivals[static_cast<size_t>(event.request - 1)].push_back(
            milliseconds_between(start, Clock::now()));
      },
      [] { return InterruptCatcher::caught() != 0; });
  end_if_interrupted();
  for (const GenerateResult& result : results) {
    if (result.finish != FinishReason::failed) continue;
    throw Error(ErrorCode::device_failure,
                fmt::format("request {} failed: {}", result.request, result.error));
  }
  return arrivals;
}

nlohmann::ordered_json figures(const EngineBenchFlags& flags, double load_ms,
                               const std::vector<std::vector<double>>& arrivals) {
  std::vector<double> first, between;
  double end = 0;
  for (const std::vector<double>& times : arrivals) {
    first.push_back(times.front());
    for (size_t i = 1; i < times.size(); ++i) between.push_back(times[i] - times[i - 1]);
    end = std::max(end, times.back());
  }
  const double prompts_end = *std::max_element(first.begin(), first.end());
  const double tokens = static_cast<double>(flags.requests) * flags.output_len;
  const double prompt_tokens = static_cast<double>(flags.requests) * flags.input_len;
  return {{"requests", flags.requests},
          {"input_len", flags.input_len},
          {"output_len", flags.output_len},
          {"load_ms", load_ms},
          {"first_token_p50_ms", percentile(first, 0.5)},
          {"first_token_p99_ms", percentile(first, 0.99)},
          {"between_tokens_p50_ms", percentile(between, 0.5)},
          {"between_tokens_p99_ms", percentile(between, 0.99)},
          {"prompt_tokens_per_s", 1e3 * prompt_tokens / prompts_end},
          {"output_tokens_per_s", 1e3 * tokens / end}};
}

void print_figures(const nlohmann::ordered_json& figures, const std::string& output) {
  if (output == "json") {
    fmt::print("{}\n", figures.dump());
    return;
  }
  const bool markdown = output == "md";
  std::string names, rule, values;
  for (const auto& [name, value] : figures.items()) {
    const char* const comma = names.empty() ? "" : markdown ? " | " : ",";
    names += comma + name;
    rule += names == name ? "---:" : " | ---:";
    values += comma +
              (value.is_number_float() ? fmt::format("{:.2f}", value.get<double>()) : value.dump());
  }
  if (markdown) {
    fmt::print("| {} |\n| {} |\n| {} |\n", names, rule, values);
  } else {
    fmt::print("{}\n{}\n", names, values);
  }
}

void run(const EngineBenchFlags& flags) {
  const InterruptCatcher catcher;
  show_progress("loading " + flags.engine.options.model_path);
  const Clock::time_point start = Clock::now();
  const std::unique_ptr<Engine> engine = Engine::load(flags.engine.parsed());
  const double load_ms = milliseconds_between(start, Clock::now());
  clear_progress();
  const auto arrivals = run_requests(*engine, make_requests(flags, *engine));
  print_figures(figures(flags, load_ms, arrivals), flags.output);
  print_note(engine->stats().memory.explain());
}

}  // namespace

void add_bench_engine(CLI::App& bench) {
  auto flags = std::make_shared<EngineBenchFlags>();
  CLI::App* command = bench.add_subcommand(
      "engine", "measure when a model's tokens arrive for concurrent requests of random tokens");
  add_engine_flags(*command, flags->engine);
  add_choice_flags(*command, flags->engine);
  CLI::Validator positive = CLI::Range(1, 1 << 22);
  positive.description("");
  command->add_option("--requests", flags->requests, "number of requests, all added at once")
      ->capture_default_str()
      ->check(positive);
  command->add_option("--input-len", flags->input_len, "prompt tokens of each request")
      ->capture_default_str()
      ->check(positive);
  command->add_option("--output-len", flags->output_len, "generated tokens of each request")
      ->capture_default_str()
      ->check(positive);
  command->add_option("--seed", flags->seed, "seed of the prompts")
      ->capture_default_str()
      ->check(whole_number);
  command->add_option("--output,-o", flags->output, "md, csv or json")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "csv", "json"}));
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
