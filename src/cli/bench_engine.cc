// SPDX-License-Identifier: Apache-2.0
// The command `bench engine`, which measures how long requests wait for their tokens, and what host
// and device do meanwhile.
#include "cli/bench_engine.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cli/bench_engine_report.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/ranks.h"
#include "fovea/engine.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct EngineBenchFlags {
  EngineFlags engine;
  RankFlags ranks;
  std::string output = "md";
  int32_t requests = 8;
  int32_t input_len = 512;
  int32_t output_len = 64;
  double sigma = 0;
  double rate = 0;
  uint64_t seed = 0;
  std::string trace;
};

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

struct Workload {
  std::vector<GenerateRequest> requests;
  std::vector<double> arrivals;  // ascending, in seconds
};

// Draws lengths, tokens and gaps between arrivals from one generator each, so that equal seeds give
// equal prompts at any rate.
Workload make_workload(const EngineBenchFlags& flags, const Engine& engine) {
  if (flags.input_len + int64_t{flags.output_len} > engine.max_context()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--input-len is {} and --output-len {}, but the context has {} tokens",
                            flags.input_len, flags.output_len, engine.max_context()));
  }
  std::mt19937_64 tokens(flags.seed), lengths(flags.seed + 1), gaps(flags.seed + 2);
  std::normal_distribution<double> normal;
  std::exponential_distribution<double> gap(flags.rate > 0 ? flags.rate : 1);
  const auto length = [&](int32_t median, int32_t max) {
    const double drawn = median * std::exp(flags.sigma * normal(lengths));
    return static_cast<int32_t>(std::clamp(std::round(drawn), 1.0, static_cast<double>(max)));
  };
  Workload load;
  double arrival = 0;
  for (int32_t i = 0; i < flags.requests; ++i) {
    GenerateRequest request;
    const int32_t prompt = length(flags.input_len, engine.max_context() - 1);
    request.sampling.max_new_tokens = length(flags.output_len, engine.max_context() - prompt);
    request.sampling.ignore_eos = true;
    for (int32_t t = 0; t < prompt; ++t) {
      const auto token = tokens() % static_cast<uint64_t>(engine.vocabulary());
      request.tokens.push_back(static_cast<int32_t>(token));
    }
    load.requests.push_back(std::move(request));
    load.arrivals.push_back(arrival);
    if (flags.rate > 0) arrival += gap(gaps);
  }
  return load;
}

struct Measured {
  std::vector<RequestTimes> requests;
  std::vector<StepStretch> stretches;
};

class Run {
 public:
  Run(Engine& engine, const Workload& load) : engine_(engine), load_(load) {
    for (size_t i = 0; i < load.requests.size(); ++i) {
      measured_.requests.push_back(
          {load.arrivals[i], static_cast<int32_t>(load.requests[i].tokens.size()), {}});
    }
  }

  Measured run() {
    start_ = Clock::now();
    while (finished_ < load_.requests.size()) {
      end_if_interrupted();
      if (engine_.idle()) wait_for_arrival();
      add_arrived();
      for (const TokenEvent& event : engine_.step()) take(event);
    }
    measured_.stretches.push_back(engine_.take_step_records());
    return std::move(measured_);
  }

 private:
  void wait_for_arrival() {
    const double wait = load_.arrivals[added_] - seconds_between(start_, Clock::now());
    if (wait <= 0) return;
    measured_.stretches.push_back(engine_.take_step_records());
    std::this_thread::sleep_for(std::chrono::duration<double>(wait));
  }

  void add_arrived() {
    const double now = seconds_between(start_, Clock::now());
    for (; added_ < load_.requests.size() && load_.arrivals[added_] <= now; ++added_) {
      index_of_[engine_.add(load_.requests[added_])] = added_;
    }
  }

  void take(const TokenEvent& event) {
    if (event.finish == FinishReason::failed) {
      throw Error(ErrorCode::device_failure,
                  fmt::format("request {} failed: {}", event.request, event.error));
    }
    finished_ += event.finish != FinishReason::none;
    measured_.requests[index_of_.at(event.request)].tokens.push_back(
        seconds_between(start_, Clock::now()));
  }

  Engine& engine_;
  const Workload& load_;
  Measured measured_;
  std::unordered_map<int64_t, size_t> index_of_;
  size_t added_ = 0, finished_ = 0;
  Clock::time_point start_;
};

void run(const EngineBenchFlags& flags) {
  if (std::isnan(flags.sigma) || std::isnan(flags.rate)) {  // CLI11's range check accepts NaN
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} is nan, must be a number",
                            std::isnan(flags.sigma) ? "--length-sigma" : "--rate"));
  }
  Ranks ranks(flags.ranks);
  if (ranks.follow(flags.engine.options.device)) return;
  const InterruptCatcher catcher;
  show_progress("loading " + flags.engine.options.model_path);
  const Clock::time_point start = Clock::now();
  EngineOptions options = flags.engine.parsed();
  options.record_steps = true;
  const std::unique_ptr<Engine> engine = load_parallel_engine(options, ranks.options());
  const double load_seconds = seconds_between(start, Clock::now());
  clear_progress();
  const Measured measured = Run(*engine, make_workload(flags, *engine)).run();
  nlohmann::ordered_json figures = {{"ranks", ranks.options().tensor_parallel},
                                    {"requests", flags.requests},
                                    {"input_len", flags.input_len},
                                    {"output_len", flags.output_len},
                                    {"length_sigma", flags.sigma},
                                    {"rate", flags.rate},
                                    {"load_ms", 1e3 * load_seconds}};
  figures.update(request_figures(measured.requests));
  figures.update(step_figures(measured.stretches, options.device == "cpu"));
  const double gain = engine->stats().speculation_gain;
  figures["speculation_gain"] =
      gain > 0 ? nlohmann::ordered_json(gain) : nlohmann::ordered_json(nullptr);
  if (!flags.trace.empty()) write_trace(flags.trace, measured.stretches);
  print_figures(figures, flags.output);
  print_note(engine->stats().graphs.explain() + engine->stats().memory.explain());
}

}  // namespace

void add_bench_engine(CLI::App& bench) {
  auto flags = std::make_shared<EngineBenchFlags>();
  CLI::App* command = bench.add_subcommand(
      "engine", "measure when a model's tokens arrive, for requests of random tokens");
  add_engine_flags(*command, flags->engine);
  add_choice_flags(*command, flags->engine);
  add_rank_flags(*command, flags->ranks);
  CLI::Validator positive = CLI::Range(1, 1 << 22);
  positive.description("");
  const auto add_number = [&](const char* name, auto& value, const char* what) {
    return command->add_option(name, value, what)->capture_default_str();
  };
  add_number("--requests", flags->requests, "number of requests")->check(positive);
  add_number("--input-len", flags->input_len, "prompt tokens of each request")->check(positive);
  add_number("--output-len", flags->output_len, "generated tokens of each request")
      ->check(positive);
  add_number("--length-sigma", flags->sigma,
             "draw both lengths from log-normal distributions with these medians and this sigma; "
             "about 1.2 resembles ShareGPT, 0 is constant")
      ->check(CLI::Range(0.0, 4.0));
  add_number("--rate", flags->rate, "arrivals per second, as a Poisson process; 0: all at once")
      ->check(CLI::Range(0.0, 1e6));
  add_number("--seed", flags->seed, "seed of prompts, lengths and arrivals")->check(whole_number);
  command->add_option("--trace", flags->trace,
                      "write host and device times of all steps to this file, for "
                      "chrome://tracing or Perfetto");
  add_number("--output,-o", flags->output, "md, csv or json")
      ->check(CLI::IsMember({"md", "csv", "json"}));
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
