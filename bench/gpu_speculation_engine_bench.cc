// SPDX-License-Identifier: Apache-2.0
// Tokens per second of decode steps with and without drafts, whose acceptance an oracle sets, on a
// model with random weights: gpu_speculation_engine_bench SHAPE [LENGTH DRAFTS]. Engines are loaded
// one after the other. Counts steps in which all requests decode. Two engines decide by their own
// measurements how many drafts a step has: one with that oracle, and one with n-grams of random
// text, which guess nothing right.
//
// gpu_speculation_engine_bench SHAPE DRAFTER DRAFTS BRANCHES measures the parts of a step with a
// draft model or a head, "draft:SHAPE" or "eagle:SHAPE": how long the device computes model and
// drafter, and the rest, in which it waits for the host.
#include <fmt/core.h>

#include <algorithm>
#include <compare>
#include <cstdlib>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fovea/engine.h"
#include "fovea/error.h"

namespace fovea::bench {
namespace {

constexpr int32_t kOutput = 160;

struct Workload {
  int32_t requests, context;
  auto operator<=>(const Workload&) const = default;
};
constexpr Workload kWorkloads[] = {{1, 1024}, {8, 1024}, {32, 1024},
                                   {1, 4096}, {8, 4096}, {32, 4096}};

struct Measured {
  double tokens = 0, seconds = 0, model_seconds = 0, drafter_seconds = 0;
  double drafting_requests = 0, accepted = 0;
  int steps = 0;
  double rate() const { return tokens / seconds; }
  double length() const { return 1 + accepted / std::max(drafting_requests, 1.0); }
};

EngineOptions options_for(const std::string& shape) {
  EngineOptions options;
  options.model_path = shape;
  options.device = "cuda";
  options.random_weights = 7;
  options.kv_dtype = DType::bf16;
  options.kv_memory_bytes = size_t{40} << 30;
  options.page_size = 64;
  options.max_context = 8192;
  options.max_requests = 64;
  options.max_graph_requests = 32;
  options.max_batch_tokens = 16384;
  options.prefix_cache = false;
  options.record_steps = true;
  return options;
}

Measured measure(Engine& engine, const Workload& load) {
  std::mt19937_64 random(static_cast<uint64_t>(load.requests * load.context));
  std::vector<GenerateRequest> requests(static_cast<size_t>(load.requests));
  for (GenerateRequest& request : requests) {
    for (int32_t i = 0; i < load.context; ++i) {
      const auto token = random() % static_cast<uint64_t>(engine.vocabulary());
      request.tokens.push_back(static_cast<int32_t>(token));
    }
    request.sampling.max_new_tokens = kOutput;
    request.sampling.ignore_eos = true;
  }
  (void)engine.take_step_records();
  (void)engine.generate(requests);
  Measured found;
  double last_end = 0;
  for (const StepRecord& step : engine.take_step_records()) {
    const double begin = std::exchange(last_end, step.deliver_end);
    if (step.decodes != load.requests || begin == 0) continue;
    ++found.steps;
    found.tokens += step.decodes + step.accepted_drafts;
    found.seconds += step.deliver_end - begin;
    found.model_seconds += step.device_end - step.device_begin;
    found.drafter_seconds += step.draft_device_seconds;
    found.drafting_requests += step.draft_requests;
    found.accepted += step.accepted_drafts;
  }
  return found;
}

using Results = std::map<Workload, Measured>;

Results run(const std::string& name, const EngineOptions& options,
            int32_t max_context = kWorkloads[std::size(kWorkloads) - 1].context) {
  fmt::print(stderr, "{}\n", name);
  const std::unique_ptr<Engine> engine = Engine::load(options);
  fmt::print(stderr, "{}", engine->stats().graphs.explain());
  Results results;
  for (const Workload& load : kWorkloads) {
    if (load.context > max_context) continue;
    const Measured found = results[load] = measure(*engine, load);
    fmt::print(stderr, "{} x {}: {} steps of {:.3f} ms, {:.2f} tokens, {:.1f} tokens/s\n",
               load.requests, load.context, found.steps, 1e3 * found.seconds / found.steps,
               found.length(), found.rate());
  }
  return results;
}

void run_all(const std::string& shape, const std::string& length, int32_t drafts) {
  EngineOptions options = options_for(shape);
  const Results plain = run("without drafts", options);
  options.max_drafts = drafts;
  options.speculate = "oracle:" + length;
  options.always_speculate = true;
  const Results always = run("oracle, always", options);
  options.always_speculate = false;
  const Results measured = run("oracle, measured widths", options);
  options.speculate = "ngram";
  const Results ngram = run("n-grams, measured widths", options);
  fmt::print(
      "| requests x context | tokens/s without | {} drafts, always: ratio | tokens a step | "
      "measured widths: ratio | n-grams of random text: ratio |\n",
      drafts);
  fmt::print("| --- | ---: | ---: | ---: | ---: | ---: |\n");
  for (const Workload& load : kWorkloads) {
    const double rate = plain.at(load).rate();
    fmt::print("| {} x {} | {:.0f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} |\n", load.requests,
               load.context, rate, always.at(load).rate() / rate, always.at(load).length(),
               measured.at(load).rate() / rate, ngram.at(load).rate() / rate);
  }
}

void run_drafter(const std::string& shape, const std::string& drafter, int32_t drafts,
                 int32_t branches) {
  EngineOptions options = options_for(shape);
  options.speculate = drafter;
  options.max_drafts = drafts;
  options.draft_branches = branches;
  options.always_speculate = true;
  const Results results =
      run(fmt::format("{}, {} drafts, {} branches", drafter, drafts, branches), options, 1024);
  fmt::print(
      "| {} drafts, {} branches: requests x context | us a step | model | drafter | rest |\n",
      drafts, branches);
  fmt::print("| --- | ---: | ---: | ---: | ---: |\n");
  for (const auto& [load, found] : results) {
    const double us = 1e6 / found.steps;
    fmt::print("| {} x {} | {:.0f} | {:.0f} | {:.0f} | {:.0f} |\n", load.requests, load.context,
               us * found.seconds, us * found.model_seconds, us * found.drafter_seconds,
               us * (found.seconds - found.model_seconds - found.drafter_seconds));
  }
}

}  // namespace
}  // namespace fovea::bench

int main(int argc, char** argv) {
  if (argc != 2 && argc != 4 && argc != 5) {
    fmt::print(stderr,
               "usage: gpu_speculation_engine_bench SHAPE [LENGTH DRAFTS | DRAFTER DRAFTS "
               "BRANCHES]\n");
    return 2;
  }
  try {
    if (argc == 5) {
      fovea::bench::run_drafter(argv[1], argv[2], std::atoi(argv[3]), std::atoi(argv[4]));
      return 0;
    }
    fovea::bench::run_all(argv[1], argc > 2 ? argv[2] : "2.7", argc > 2 ? std::atoi(argv[3]) : 3);
  } catch (const fovea::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
