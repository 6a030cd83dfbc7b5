// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
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

std::vector<GenerateRequest> make_requests(const GenerateFlags& flags) {
  std::vector<GenerateRequest> requests;
  for (const std::string& prompt : flags.prompts) requests.push_back({.prompt = prompt});
  if (flags.prompt_file) requests.push_back({.prompt = read_prompt_file(*flags.prompt_file)});
  if (!flags.tokens.empty()) requests.push_back({.tokens = flags.tokens});
  if (requests.empty()) {
    throw Error(ErrorCode::invalid_argument, "no prompt: give --prompt, --prompt-file or --tokens");
  }
  for (GenerateRequest& request : requests) request.sampling = flags.sampling;
  return requests;
}

// CLI11 takes "-1" for 2^64 - 1 and whatever is too large too.
std::string whole_number(const std::string& text) {
  uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc{} && rest == end) return {};
  return fmt::format("'{}' must be a whole number below 2^64", text);
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

double megabytes(size_t bytes) { return static_cast<double>(bytes) / 1e6; }

void print_stats(const EngineStats& stats) {
  const auto rate = [](int64_t tokens, double seconds) {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0;
  };
  print_note(fmt::format(
      "prefill {} tokens, {:.0f} tokens/s; decode {} tokens, {:.0f} tokens/s; prefix cache {} of "
      "{} tokens\n"
      "weights {:.1f} MB mapped, KV budget {:.1f} MB, workspace {:.1f} MB; {} steps, {} of them "
      "with shared prefixes, {} preemptions\n",
      stats.prefill_tokens, rate(stats.prefill_tokens, stats.prefill_seconds), stats.decode_tokens,
      rate(stats.decode_tokens, stats.decode_seconds), stats.prefix_hits, stats.prefix_queries,
      megabytes(stats.weight_bytes), megabytes(stats.kv_bytes), megabytes(stats.workspace_bytes),
      stats.steps, stats.shared_steps, stats.preemptions));
  if (stats.graphs > 0)
    print_note(fmt::format("{} graphs of decode steps, {:.1f} MB\n", stats.graphs,
                           megabytes(stats.graph_bytes)));
}

// What was asked for and is not done is never passed over in silence: a preferred backend that does
// not serve, graphs, scales that nobody sets, the model's whole context, one of two checkpoints.
void print_fallbacks(const Engine& engine) {
  if (!engine.checkpoint_note().empty()) {
    print_note(fmt::format("fovea: {}\n", engine.checkpoint_note()));
  }
  if (engine.max_context() < engine.wanted_context()) {
    print_note(fmt::format(
        "fovea: the context ends at {} of the model's {} tokens, which is all that {:.1f} MB of "
        "caches hold (--kv-memory)\n",
        engine.max_context(), engine.wanted_context(), megabytes(engine.stats().kv_bytes)));
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
  const std::vector<GenerateRequest> requests = make_requests(flags);
  if (!flags.json && (flags.sampling.logprobs >= 0 || flags.sampling.prompt_logprobs)) {
    throw Error(ErrorCode::invalid_argument, "--logprobs and --prompt-logprobs need --json");
  }
  show_progress("loading " + flags.engine.options.model_path);
  const std::unique_ptr<Engine> engine = Engine::load(flags.engine.parsed());
  clear_progress();
  print_fallbacks(*engine);
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
