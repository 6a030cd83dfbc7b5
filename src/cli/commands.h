// SPDX-License-Identifier: Apache-2.0
// One function per subcommand; each adds itself to the program and runs when chosen.
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

// The model argument and every flag of EngineOptions, read into `options` when parsed.
struct EngineFlags {
  EngineOptions options;
  std::string backend = "auto";
  std::optional<std::string> decode_backend;
  std::optional<std::string> kv_dtype;  // unset: fp32, on a GPU bf16
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
// --backend and --kv-dtype, which `check` varies, and --random-weights, which have no reference.
void add_choice_flags(CLI::App& command, EngineFlags& flags);
void add_random_weights(CLI::App& command, std::optional<uint64_t>& seed);

// CLI11 takes "-1" for 2^64 - 1 and whatever is too large too: what is wrong with the text of an
// unsigned number, or nothing.
std::string whole_number(const std::string& text);

// Takes one value each time it is given: a list that takes whatever follows would take the
// positional arguments too.
template <typename T>
CLI::Option* add_list(CLI::App& command, const std::string& names, std::vector<T>& values,
                      const std::string& description) {
  return command.add_option(names, values, description)->allow_extra_args(false);
}

// What stands between the commas of `text`. CLI::ValidationError naming the option where that is
// nothing: CLI11's own delimiter would drop the entry.
std::vector<std::string> split_list(const std::string& option, const std::string& text);

// As add_list, with one entry or several between commas each time; `check` sees every entry.
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

// Error{invalid_argument} listing the known names.
DType parse_dtype_flag(std::string_view flag, std::string_view value);
KvScale parse_kv_scale_flag(std::string_view value);
// "512MB" in bytes, units of 1024. Error{invalid_argument} unless it is a positive number that 64
// bits hold.
size_t parse_size_flag(std::string_view flag, std::string_view value);
void add_workspace_budget(CLI::App& command, std::optional<std::string>& value);
int64_t parse_workspace_budget(const std::string& value);

// A line on stderr that the next call overwrites; nothing when stderr is not a terminal.
void show_progress(std::string_view what);
void clear_progress();

// On stderr, beside the results: a command does not fail because nobody can read it.
void print_note(const std::string& text);

void flush_stdout();  // Error{io} when it, or something before it, could not be written

}  // namespace fovea::cli
