// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/prompts.h"
#include "cli/ranks.h"
#include "cli/results.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

struct GenerateFlags {
  EngineFlags engine;
  PromptFlags prompts;
  SamplingParams sampling;
  RankFlags ranks;
  bool json = false;
  bool stats = false;
};

// Prints nothing without drafts.
void print_speculation(const EngineStats& stats) {
  if (stats.drafts == 0) return;
  const auto ratio = [](int64_t a, int64_t b) {
    return static_cast<double>(a) / static_cast<double>(b);
  };
  print_note(
      fmt::format("speculation: {} of {} steps with drafts, {:.1f} per request, {:.0f} % "
                  "accepted; ",
                  stats.draft_steps, stats.steps, ratio(stats.drafts, stats.draft_requests),
                  100 * ratio(stats.accepted_drafts, stats.drafts)));
  print_note(
      stats.speculation_gain > 0
          ? fmt::format("{:.2f} times the tokens/s of steps without\n", stats.speculation_gain)
          : std::string("gain not measured\n"));
}

void print_stats(const EngineStats& stats) {
  const auto rate = [](int64_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
  };
  print_note(fmt::format(
      "prefill {} tokens, {:.0f} tokens/s; decode {} tokens, {:.0f} tokens/s; prefix cache {} of "
      "{} tokens\n"
      "{} steps, {} of them with shared prefixes, {} preemptions\n",
      stats.prefill_tokens, rate(stats.prefill_tokens, stats.prefill_seconds), stats.decode_tokens,
      rate(stats.decode_tokens, stats.decode_seconds), stats.prefix_hits, stats.prefix_queries,
      stats.steps, stats.shared_steps, stats.preemptions));
  print_speculation(stats);
  print_note(stats.graphs.explain());
  print_note(stats.memory.explain());
}

// A signal ends generation early. Tokens generated before it are printed like any other result.
void print_results(Engine& engine, std::span<const GenerateRequest> requests,
                   ResultPrinter& printer) {
  try {
    (void)engine.generate(
        requests, [&](const TokenEvent& event) { printer.add(event); },
        [] { return InterruptCatcher::caught() != 0; });
  } catch (const std::exception& error) {
    printer.fail_rest(engine, error.what());
    throw;
  }
}

void run(const GenerateFlags& flags) {
  Ranks ranks(flags.ranks);
  if (ranks.follow(flags.engine.options.device)) return;
  std::vector<Prompt> prompts = read_prompts(flags.prompts);
  if (!flags.json && (flags.sampling.logprobs >= 0 || flags.sampling.prompt_logprobs)) {
    throw Error(ErrorCode::invalid_argument, "--logprobs and --prompt-logprobs need --json");
  }
  show_progress("loading " + flags.engine.options.model_path);
  std::unique_ptr<Engine> engine = load_parallel_engine(flags.engine.parsed(), ranks.options());
  clear_progress();
  print_fallbacks(*engine);
  append_random_prompts(flags.prompts, *engine, flags.sampling.seed, prompts);
  std::vector<GenerateRequest> requests;
  std::vector<std::string> shown;
  for (const Prompt& prompt : prompts) {
    GenerateRequest& request = requests.emplace_back();
    request.sampling = flags.sampling;
    if (flags.prompts.chat) {
      request.tokens = engine->encode_chat({prompt.text, flags.prompts.system});
    } else {
      request.prompt = prompt.text;
      request.tokens = prompt.tokens;
    }
    shown.push_back(request.prompt);
  }
  const InterruptCatcher catcher;
  ResultPrinter printer(requests, std::move(shown),
                        flags.json             ? ResultFormat::json
                        : requests.size() == 1 ? ResultFormat::stream
                                               : ResultFormat::lines,
                        engine->has_text());
  print_results(*engine, requests, printer);
  if (flags.stats) print_stats(engine->stats());
  engine.reset();
  ranks.end();
  end_if_interrupted();
  for (const std::string& failure : printer.failures()) print_note("fovea: " + failure + "\n");
  if (!printer.failures().empty()) throw CLI::RuntimeError(1);
}

}  // namespace

void add_generate(CLI::App& program) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = program.add_subcommand("generate", "generate text from a checkpoint");
  add_engine_flags(*command, flags->engine);
  add_choice_flags(*command, flags->engine);
  add_rank_flags(*command, flags->ranks);
  add_prompt_flags(*command, flags->prompts);
  SamplingParams& sampling = flags->sampling;
  command
      ->add_option("--max-new-tokens,-n", sampling.max_new_tokens,
                   "max generated tokens per prompt")
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0 is greedy")->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "0 is off")->capture_default_str();
  command
      ->add_option("--top-p", sampling.top_p,
                   "drop the least likely tokens beyond this probability mass")
      ->capture_default_str();
  command
      ->add_option("--min-p", sampling.min_p, "min probability relative to the most likely token")
      ->capture_default_str();
  command
      ->add_option("--seed", sampling.seed,
                   "seed of every prompt; equal prompts, flags and seeds give equal texts")
      ->capture_default_str()
      ->check(whole_number);
  add_list(*command, "--stop", sampling.stop, "text that ends generation; repeatable");
  command->add_flag("--ignore-eos", sampling.ignore_eos, "continue after an end-of-sequence token");
  command->add_option("--logprobs", sampling.logprobs,
                      "with --json: print log-probabilities and this many alternatives");
  command->add_flag("--prompt-logprobs", sampling.prompt_logprobs,
                    "with --json: print log-probabilities of the prompt");
  command->add_flag("--json", flags->json, "print one JSON object per line");
  command->add_flag("--stats", flags->stats, "print speed and memory on stderr");
  command->footer(
      "SIGINT (Ctrl-C) and SIGTERM end generation after the current step. The text generated\n"
      "so far is printed, with --json as finish_reason \"cancelled\", and the exit code is 130\n"
      "or 143. A second signal ends the program at once. If a prompt fails, for example because\n"
      "its logits are not numbers, the others continue: a line on stderr names it, and the exit\n"
      "code is 1.");
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
