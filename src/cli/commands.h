// SPDX-License-Identifier: Apache-2.0
// Declares one function per subcommand. Each adds its subcommand to the program and runs it if
// chosen.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/engine.h"

namespace fovea::cli {

void add_generate(CLI::App& program);
void add_check(CLI::App& program);
void add_explain(CLI::App& program);
void add_backends(CLI::App& program);
void add_env(CLI::App& program);
void add_bench(CLI::App& program);
void add_kernels(CLI::App& program);
void add_serve(CLI::App& program);

// The model argument and all flags of EngineOptions, which parsing stores in `options`.
struct EngineFlags {
  EngineOptions options;
  std::string backend = "auto";
  std::optional<std::string> decode_backend;
  std::optional<std::string> kv_dtype;  // default fp32, or bf16 on a GPU
  std::optional<std::string> kv_scale;
  std::optional<std::string> kv_memory;
  std::optional<std::string> min_prefix_savings;
  std::optional<std::string> workspace_budget;
  std::optional<int32_t> max_graph_requests;
  bool no_prefix_cache = false;
  bool no_cuda_graphs = false;

  EngineOptions parsed() const;
};
void add_engine_flags(CLI::App& command, EngineFlags& flags);
// Adds --backend and --kv-dtype, which `check` varies, and --random-weights, for which no reference
// exists.
void add_choice_flags(CLI::App& command, EngineFlags& flags);
void add_random_weights(CLI::App& command, std::optional<uint64_t>& seed);

// Returns the problem with the text of an unsigned number, or an empty string. CLI11 would accept
// "-1" as 2^64 - 1, and values that are too large.
std::string whole_number(const std::string& text);

// Adds an option that takes one value each time it is given. A list option of CLI11 would also
// consume the positional arguments that follow it.
template <typename T>
CLI::Option* add_list(CLI::App& command, const std::string& names, std::vector<T>& values,
                      const std::string& description) {
  return command.add_option(names, values, description)->allow_extra_args(false);
}

// Splits `text` at commas. Throws CLI::ValidationError naming the option for an empty entry, which
// CLI11's own delimiter would drop.
std::vector<std::string> split_list(const std::string& option, const std::string& text);

// Works as add_list, with one or more entries between commas each time. `check` validates each
// entry.
template <typename T>
CLI::Option* add_comma_list(CLI::App& command, const std::string& names, std::vector<T>& values,
                            const std::string& description, const CLI::Validator& check = {}) {
  const auto read = [&values, names, check](const CLI::results_t& given) {
    CLI::results_t entries;
    for (const std::string& text : given) {
      for (const std::string& entry : split_list(names, text)) {
        if (const std::string problem = check(entry); !problem.empty()) {
          throw CLI::ValidationError(names, problem);
        }
        entries.push_back(entry);
      }
    }
    return CLI::detail::lexical_conversion<std::vector<T>, std::vector<T>>(entries, values);
  };
  const std::string accepted = check.get_description();
  return command.add_option(names, read, description)
      ->type_name(CLI::detail::type_name<T>() + (accepted.empty() ? "" : ":" + accepted))
      ->expected(1, CLI::detail::expected_max_vector_size)
      ->allow_extra_args(false);
}

// Throws Error{invalid_argument} listing the known names.
DType parse_dtype_flag(std::string_view flag, std::string_view value);
KvScale parse_kv_scale_flag(std::string_view value);
// Parses sizes such as "512MB", with units of 1024, to bytes. Throws Error{invalid_argument} unless
// the result is positive and fits 64 bits.
size_t parse_size_flag(std::string_view flag, std::string_view value);
void add_workspace_budget(CLI::App& command, std::optional<std::string>& value);
int64_t parse_workspace_budget(const std::string& value);

// Prints a line on stderr that the next call overwrites. Prints nothing if stderr is not a
// terminal.
void show_progress(std::string_view what);
void clear_progress();

// Prints a note on stderr. Ignores write errors, so that a command does not fail because of a note.
void print_note(const std::string& text);

// Reports every request that could not be fulfilled: a preferred backend that does not support the
// model, graphs, scales that nothing sets, the model's full context, one of two checkpoints.
void print_fallbacks(const Engine& engine);

void flush_stdout();  // throws Error{io} if earlier output could not be written

}  // namespace fovea::cli
