// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <limits>
#include <system_error>

#include "cli/commands.h"
#include "fovea/error.h"

namespace fovea::cli {

size_t parse_size_flag(std::string_view flag, std::string_view value) {
  size_t number = 0;
  const auto [rest, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  std::string unit(rest, value.data() + value.size());
  std::ranges::transform(unit, unit.begin(), [](unsigned char c) { return std::tolower(c); });
  if (unit.ends_with('b')) unit.pop_back();
  if (unit.size() == 2 && unit.ends_with('i')) unit.pop_back();
  constexpr std::array<std::string_view, 5> kUnits = {"", "k", "m", "g", "t"};
  const auto found = std::ranges::find(kUnits, unit);
  if (error == std::errc{} && number > 0 && found != kUnits.end()) {
    const auto shift = static_cast<int>(10 * (found - kUnits.begin()));
    if (number <= std::numeric_limits<size_t>::max() >> shift) return number << shift;
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{} is '{}', must be a positive number of bytes below 2^64, like 512MB "
                          "(units: KB, MB, GB, TB)",
                          flag, value));
}

DType parse_dtype_flag(std::string_view flag, std::string_view value) {
  const std::optional<DType> dtype = parse_dtype(value);
  if (!dtype || !is_floating(*dtype)) {
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("{} is '{}', known: fp32, fp16, bf16, fp8_e4m3, fp8_e5m2", flag, value));
  }
  return *dtype;
}

KvScale parse_kv_scale_flag(std::string_view value) {
  constexpr std::array<std::string_view, 4> kNames = {"none", "per_tensor", "per_head",
                                                      "per_token_head"};
  const auto found = std::ranges::find(kNames, value);
  if (found != kNames.end()) return static_cast<KvScale>(found - kNames.begin());
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--kv-scale is '{}', known: {}", value, fmt::join(kNames, ", ")));
}

std::vector<std::string> split_list(const std::string& option, const std::string& text) {
  std::vector<std::string> entries;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (begin == end) {
      throw CLI::ValidationError(option, fmt::format("'{}' has an empty entry", text));
    }
    entries.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return entries;
}

EngineOptions EngineFlags::parsed() const {
  EngineOptions result = options;
  if (kv_memory) result.kv_memory_bytes = parse_size_flag("--kv-memory", *kv_memory);
  result.backend = parse_backend_wish(backend);
  if (decode_backend) result.decode_backend = parse_backend_wish(*decode_backend);
  const bool on_cpu = result.device == "cpu";
  result.kv_dtype = kv_dtype ? parse_dtype_flag("--kv-dtype", *kv_dtype)
                    : on_cpu ? DType::f32
                             : DType::bf16;
  if (kv_scale) result.kv_scale = parse_kv_scale_flag(*kv_scale);
  if (on_cpu && (no_cuda_graphs || max_graph_requests)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{} needs --device cuda",
                            no_cuda_graphs ? "--no-cuda-graphs" : "--max-graph-requests"));
  }
  result.max_graph_requests = max_graph_requests.value_or(result.max_graph_requests);
  if (min_prefix_savings) {
    result.min_prefix_savings = static_cast<int64_t>(
        std::min<size_t>(parse_size_flag("--min-prefix-savings", *min_prefix_savings),
                         std::numeric_limits<int64_t>::max()));
  }
  if (workspace_budget) result.workspace_budget = parse_workspace_budget(*workspace_budget);
  result.cuda_graphs = !no_cuda_graphs;
  result.prefix_cache = !no_prefix_cache;
  return result;
}

void add_engine_flags(CLI::App& command, EngineFlags& flags) {
  EngineOptions& options = flags.options;
  command
      .add_option("model", options.model_path,
                  "folder with config.json, *.safetensors and tokenizer.json or tokenizer.model")
      ->required();
  command.add_option("--decode-backend", flags.decode_backend, "another backend for decode steps");
  command.add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  command.add_option("--kv-memory", flags.kv_memory,
                     "budget of all caches, e.g. 512MB; default half of the device's free memory");
  command.add_option(
      "--kv-scale", flags.kv_scale,
      "scales of an fp8 cache: per_tensor or per_head (constant 1), or per_token_head; "
      "default per_token_head, and for e4m3 latents of 512 + 64 one per 128 values");
  command.add_option("--page-size", options.page_size, "tokens of a page")->capture_default_str();
  command.add_option("--max-requests", options.max_requests, "concurrent requests")
      ->capture_default_str();
  command.add_option("--max-batch-tokens", options.max_batch_tokens, "new tokens of one step")
      ->capture_default_str();
  command.add_option("--max-mixed-tokens", options.max_mixed_tokens,
                     "new tokens of a step with decodes and prompts together, which bounds the "
                     "time between tokens; default --max-batch-tokens");
  command.add_option("--max-context", options.max_context,
                     "tokens of one request; default the model's");
  command.add_option("--threads", options.threads, "default one per core");
  command.add_flag("--no-prefix-cache", flags.no_prefix_cache, "do not reuse prefixes");
  command
      .add_option("--prefix-levels", options.prefix_levels,
                  "max levels of shared prefixes, each read once for all its requests; 0 is off")
      ->capture_default_str();
  command.add_option("--min-prefix-savings", flags.min_prefix_savings,
                     "min bytes per layer that a level must save, e.g. 8MB; default 1 MB, on a GPU "
                     "512 MB");
  add_workspace_budget(command, flags.workspace_budget);
  command.add_flag("--no-cuda-graphs", flags.no_cuda_graphs,
                   "on a GPU: enqueue the kernels of every decode step");
  command.add_option("--max-graph-requests", flags.max_graph_requests,
                     fmt::format("on a GPU: decode steps of more requests are enqueued; default {}",
                                 options.max_graph_requests));
  command.add_flag_callback(
      "--overlap", [&options] { options.overlap = true; }, "enqueue the next step while one runs");
  command.add_option("--speculate", options.speculate,
                     "verify guessed tokens, several in a step: ngram guesses what followed the "
                     "text's last tokens earlier, draft:FOLDER what a smaller model says, "
                     "eagle:FOLDER what an EAGLE-3 head of the model says; the text is the same. "
                     "With random weights, oracle:LENGTH accepts drafts such "
                     "that a step yields LENGTH tokens on average, to measure its time");
  command.add_option("--max-drafts", options.max_drafts, "guessed tokens per request and step")
      ->capture_default_str();
  command
      .add_option("--draft-branches", options.draft_branches,
                  "guess up to so many tokens after each one: trees of --max-drafts guesses by "
                  "draft:FOLDER or eagle:FOLDER")
      ->capture_default_str();
  command.add_flag("--always-speculate", options.always_speculate,
                   "guess even where steps without guesses are faster");
  command.add_flag("--batch-invariant", options.batch_invariant,
                   "make a request's bits independent of the rest of the batch");
}

void add_choice_flags(CLI::App& command, EngineFlags& flags) {
  command.add_option("--backend", flags.backend, "auto, NAME, or prefer:NAME")
      ->capture_default_str();
  command.add_option("--kv-dtype", flags.kv_dtype,
                     "fp32, bf16, fp16, fp8_e4m3 or fp8_e5m2; default fp32, on a GPU bf16");
  add_random_weights(command, flags.options.random_weights);
}

void add_random_weights(CLI::App& command, std::optional<uint64_t>& seed) {
  command
      .add_option("--random-weights", seed,
                  "generate the weights from this seed; the model needs only a config.json")
      ->check(whole_number);
}

void add_workspace_budget(CLI::App& command, std::optional<std::string>& value) {
  command.add_option("--workspace-budget", value,
                     "max workspace of attention, above which MLA processes its heads in several "
                     "steps; default 1536MB");
}

int64_t parse_workspace_budget(const std::string& value) {
  return static_cast<int64_t>(std::min<size_t>(parse_size_flag("--workspace-budget", value),
                                               std::numeric_limits<int64_t>::max()));
}

std::string whole_number(const std::string& text) {
  uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error == std::errc{} && rest == end) return {};
  return fmt::format("'{}' must be a whole number below 2^64", text);
}

namespace {

bool progress_shown = false;

}  // namespace

void show_progress(std::string_view what) {
  if (!isatty(STDERR_FILENO)) return;
  print_note(fmt::format("\r\033[K{}", what));
  std::fflush(stderr);
  progress_shown = true;
}

void flush_stdout() {
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  throw Error(ErrorCode::io, fmt::format("stdout: {}", std::generic_category().message(errno)));
}

void clear_progress() {
  if (!progress_shown) return;
  print_note("\r\033[K");
  progress_shown = false;
}

void print_note(const std::string& text) { std::fputs(text.c_str(), stderr); }

}  // namespace fovea::cli
