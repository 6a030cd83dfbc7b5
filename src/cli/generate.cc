// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <system_error>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "fovea/error.h"

namespace fovea::cli {
namespace {

struct GenerateFlags {
  EngineFlags engine;
  std::vector<std::string> prompts;
  std::optional<std::string> prompt_file;  // "-": standard input
  std::vector<int32_t> tokens;
  std::optional<std::string> random_prompts;
  SamplingParams sampling;
  bool json = false;
  bool stats = false;
};

std::string read_prompt_file(const std::string& path) {
  // By the calls of C: a stream of C++ throws for a folder. Pipes are welcome.
  const std::unique_ptr<FILE, int (*)(FILE*)> file(
      path == "-" ? stdin : std::fopen(path.c_str(), "rb"), std::fclose);
  std::string text;
  std::array<char, 1 << 16> block;
  for (size_t size = 0; file && (size = std::fread(block.data(), 1, block.size(), file.get())) > 0;)
    text.append(block.data(), size);
  if (!file || std::ferror(file.get())) {
    throw Error(ErrorCode::io,
                fmt::format("--prompt-file {}: {}", path, std::generic_category().message(errno)));
  }
  return text;
}

// Of --random-prompts.
struct PromptSizes {
  int32_t prompts = 0, tokens = 0;
};

// "8x512", or "512" for one prompt.
PromptSizes parse_prompt_sizes(const std::string& text) {
  const auto number = [](std::string_view digits) {
    int32_t value = 0;
    const char* const end = digits.data() + digits.size();
    const auto [rest, error] = std::from_chars(digits.data(), end, value);
    return error == std::errc{} && rest == end ? value : 0;
  };
  const size_t cross = text.find('x');
  const std::string_view whole = text;
  const PromptSizes sizes = cross == text.npos ? PromptSizes{1, number(whole)}
                                               : PromptSizes{number(whole.substr(0, cross)),
                                                             number(whole.substr(cross + 1))};
  if (sizes.prompts > 0 && sizes.tokens > 0) return sizes;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--random-prompts is '{}', must be a number of tokens, or of prompts and "
                          "of tokens in each like 8x512, both from 1 to 2^31 - 1",
                          text));
}

// The same ids for the same seed: the generator's numbers are laid down by the C++ standard.
void append_random_prompts(const GenerateFlags& flags, const Engine& engine,
                           std::vector<GenerateRequest>& requests) {
  if (!flags.random_prompts) return;
  const PromptSizes sizes = parse_prompt_sizes(*flags.random_prompts);
  if (sizes.tokens > engine.max_context()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--random-prompts is '{}', but the context has {} tokens",
                            *flags.random_prompts, engine.max_context()));
  }
  std::mt19937_64 random(flags.sampling.seed);
  for (int32_t i = 0; i < sizes.prompts; ++i) {
    GenerateRequest& request = requests.emplace_back();
    request.sampling = flags.sampling;
    for (int32_t t = 0; t < sizes.tokens; ++t) {
      request.tokens.push_back(
          static_cast<int32_t>(random() % static_cast<uint64_t>(engine.vocabulary())));
    }
  }
}

std::vector<GenerateRequest> make_requests(const GenerateFlags& flags) {
  std::vector<GenerateRequest> requests;
  for (const std::string& prompt : flags.prompts) requests.push_back({.prompt = prompt});
  if (flags.prompt_file) requests.push_back({.prompt = read_prompt_file(*flags.prompt_file)});
  if (!flags.tokens.empty()) requests.push_back({.tokens = flags.tokens});
  if (flags.random_prompts) {
    parse_prompt_sizes(*flags.random_prompts);  // before a model is loaded
  } else if (requests.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "no prompt: give --prompt, --prompt-file, --tokens or --random-prompts");
  }
  for (GenerateRequest& request : requests) request.sampling = flags.sampling;
  return requests;
}

const char* finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::none:
      return "none";
    case FinishReason::stop:
      return "stop";
    case FinishReason::length:
      return "length";
    case FinishReason::cancelled:
      return "cancelled";
  }
  return "?";
}

nlohmann::ordered_json to_json(const GenerateResult& result) {
  nlohmann::ordered_json json{{"text", result.text},
                              {"tokens", result.tokens},
                              {"finish_reason", finish_name(result.finish)},
                              {"prompt_tokens", result.prompt_tokens},
                              {"cached_tokens", result.cached_tokens}};
  if (!result.logprobs.empty()) json["logprobs"] = result.logprobs;
  if (!result.top.empty()) {
    json["top_logprobs"] = nlohmann::ordered_json::array();
    for (const std::vector<TokenLogprob>& alternatives : result.top) {
      nlohmann::ordered_json row = nlohmann::ordered_json::array();
      for (const TokenLogprob& top : alternatives) {
        row.push_back({{"token", top.token}, {"logprob", top.logprob}});
      }
      json["top_logprobs"].push_back(std::move(row));
    }
  }
  if (!result.prompt_logprobs.empty()) json["prompt_logprobs"] = result.prompt_logprobs;
  return json;
}

void print_stats(const EngineStats& stats) {
  const auto rate = [](int64_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
  };
  print_note(fmt::format(
      "prefill {} tokens, {:.0f} tokens/s; decode {} tokens, {:.0f} tokens/s; prefix cache {} of "
      "{} tokens\n"
      "{} steps, {} of them with shared prefixes, {} preemptions; {} graphs of decode steps\n",
      stats.prefill_tokens, rate(stats.prefill_tokens, stats.prefill_seconds), stats.decode_tokens,
      rate(stats.decode_tokens, stats.decode_seconds), stats.prefix_hits, stats.prefix_queries,
      stats.steps, stats.shared_steps, stats.preemptions, stats.graphs));
  print_note(stats.memory.explain());
}

// What was asked for and is not done is never passed over in silence: a preferred backend that does
// not serve, graphs, scales that nobody sets, the model's whole context, one of two checkpoints.
void print_fallbacks(const Engine& engine) {
  for (const std::string& note : engine.notes()) print_note(fmt::format("fovea: {}\n", note));
  if (engine.max_context() < engine.wanted_context()) {
    print_note(
        fmt::format("fovea: the context ends at {} of {} tokens, which is all that {:.1f} MB of "
                    "caches hold (--kv-memory)\n",
                    engine.max_context(), engine.wanted_context(),
                    static_cast<double>(engine.stats().memory.caches) / 1e6));
  }
  for (const GroupSelection& group : engine.selections()) {
    for (const std::string& text :
         {group.prefill.fallback, group.decode ? group.decode->fallback : std::string(),
          group.why_no_graphs}) {
      if (!text.empty()) print_note(fmt::format("fovea: {}: {}\n", group.layers, text));
    }
    const KvScale scale = group.request.cache.scale;
    if (scale == KvScale::per_tensor || scale == KvScale::per_head) {
      print_note(fmt::format(
          "fovea: {}: the scales of the cache stay 1, what is larger than {} holds is cut\n",
          group.layers, dtype_name(group.request.cache.dtype)));
    }
  }
}

// What was generated until a signal came is printed as ever.
void run(const GenerateFlags& flags) {
  std::vector<GenerateRequest> requests = make_requests(flags);
  if (!flags.json && (flags.sampling.logprobs >= 0 || flags.sampling.prompt_logprobs)) {
    throw Error(ErrorCode::invalid_argument, "--logprobs and --prompt-logprobs need --json");
  }
  show_progress("loading " + flags.engine.options.model_path);
  const std::unique_ptr<Engine> engine = Engine::load(flags.engine.parsed());
  clear_progress();
  print_fallbacks(*engine);
  append_random_prompts(flags, *engine, requests);
  // One prompt streams; several are printed whole, in their order.
  const bool stream = requests.size() == 1 && !flags.json;
  bool started = false;
  const auto print_event = [&](const TokenEvent& event) {
    if (!stream) return;
    if (!started && !requests[0].prompt.empty()) fmt::print("{}", requests[0].prompt);
    started = true;
    fmt::print("{}", event.text);
    flush_stdout();
  };
  const InterruptCatcher catcher;
  const std::vector<GenerateResult> results =
      engine->generate(requests, print_event, [] { return InterruptCatcher::caught() != 0; });
  for (size_t i = 0; i < results.size(); ++i) {
    if (flags.json) {
      fmt::print("{}\n", to_json(results[i]).dump());
    } else if (stream) {
      fmt::print("\n");
    } else {
      fmt::print("[{}] {}{}\n", i, requests[i].prompt, results[i].text);
    }
  }
  flush_stdout();
  if (flags.stats) print_stats(engine->stats());
  end_if_interrupted();
}

}  // namespace

void add_generate(CLI::App& program) {
  auto flags = std::make_shared<GenerateFlags>();
  CLI::App* command = program.add_subcommand("generate", "text from a checkpoint");
  add_engine_flags(*command, flags->engine);
  add_choice_flags(*command, flags->engine);
  add_list(*command, "--prompt,-p", flags->prompts, "text to continue; repeat it for a batch");
  command->add_option("--prompt-file", flags->prompt_file,
                      "text to continue, from a file; - is standard input");
  add_comma_list(*command, "--tokens", flags->tokens, "token ids to continue, comma-separated");
  command->add_option("--random-prompts", flags->random_prompts,
                      "NxM: N prompts of M random token ids, made from --seed");
  SamplingParams& sampling = flags->sampling;
  command->add_option("--max-new-tokens,-n", sampling.max_new_tokens, "of each prompt")
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0 is greedy")->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "0 is off")->capture_default_str();
  command->add_option("--top-p", sampling.top_p, "least likely tokens beyond this mass are dropped")
      ->capture_default_str();
  command->add_option("--min-p", sampling.min_p, "relative to the most likely token")
      ->capture_default_str();
  command
      ->add_option("--seed", sampling.seed,
                   "of every prompt: the same prompt, flags and seed give the same text")
      ->capture_default_str()
      ->check(whole_number);
  add_list(*command, "--stop", sampling.stop, "text that ends generation; repeatable");
  command->add_flag("--ignore-eos", sampling.ignore_eos, "go on after an end-of-sequence token");
  command->add_option("--logprobs", sampling.logprobs,
                      "with --json: log-probabilities and this many alternatives");
  command->add_flag("--prompt-logprobs", sampling.prompt_logprobs,
                    "with --json: of the prompt too");
  command->add_flag("--json", flags->json, "one JSON object a line");
  command->add_flag("--stats", flags->stats, "speed and memory on stderr");
  command->footer(
      "SIGINT (Ctrl-C) and SIGTERM end generation after the step under way: what there is of\n"
      "every prompt is printed, with --json as finish_reason \"cancelled\", and the exit code is\n"
      "130 or 143. A second one ends the program at once.");
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
