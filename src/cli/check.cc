// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/ranks.h"
#include "fovea/error.h"
#include "fovea/verify_model.h"

namespace fovea::cli {
namespace {

struct CheckFlags {
  EngineFlags engine;
  RankFlags ranks;
  std::vector<std::string> backends;
  std::vector<std::string> kv_dtypes;
  bool no_perplexity = false;
  bool json = false;
};

std::string on_one_line(std::string text) {
  for (size_t at = 0; (at = text.find('\n', at)) != text.npos;) {
    const size_t next = text.find_first_not_of("\n ", at);
    text.replace(at, next - at, "; ");
  }
  return text;
}

void print_table(const std::vector<VerifyRow>& rows) {
  fmt::print(
      "| backend | kv dtype | max logit difference | greedy tokens equal | perplexity | change "
      "| |\n"
      "| --- | --- | ---: | ---: | ---: | ---: | --- |\n");
  for (const VerifyRow& row : rows) {
    if (!row.unsupported.empty()) {
      fmt::print("| {} | {} | | | | | refused: {} |\n", row.backend, dtype_name(row.kv_dtype),
                 on_one_line(row.unsupported));
      continue;
    }
    const std::string perplexity =
        row.perplexity > 0
            ? fmt::format("{:.3f} | {:+.3f} %", row.perplexity, row.perplexity_change * 100)
            : "- | -";
    fmt::print("| {} | {} | {:.2e} | {}/{} | {} | {} |\n", row.backend, dtype_name(row.kv_dtype),
               row.max_logit_difference, row.greedy_equal, row.greedy_total, perplexity,
               row.pass ? "pass" : "FAIL");
  }
}

void print_json(const std::vector<VerifyRow>& rows) {
  const auto or_null = [](double value, bool known) {
    return known ? nlohmann::json(value) : nullptr;
  };
  nlohmann::ordered_json report = nlohmann::ordered_json::array();
  for (const VerifyRow& row : rows) {
    nlohmann::ordered_json entry{{"backend", row.backend}, {"kv_dtype", dtype_name(row.kv_dtype)}};
    if (!row.unsupported.empty()) {
      entry["unsupported"] = row.unsupported;
    } else {
      entry.update({{"max_logit_difference", row.max_logit_difference},
                    {"greedy_equal", row.greedy_equal},
                    {"greedy_total", row.greedy_total},
                    {"perplexity", or_null(row.perplexity, row.perplexity > 0)},
                    {"perplexity_change", or_null(row.perplexity_change, row.perplexity > 0)},
                    {"pass", row.pass}});
    }
    report.push_back(std::move(entry));
  }
  fmt::print("{}\n", report.dump(2));
}

void run(const CheckFlags& flags) {
  Ranks ranks(flags.ranks);
  if (ranks.follow(flags.engine.options.device)) return;
  VerifyOptions options;
  options.engine = flags.engine.parsed();
  options.parallel = ranks.options();
  options.backends = flags.backends;
  if (!flags.kv_dtypes.empty()) {
    options.kv_dtypes.clear();
    for (const std::string& name : flags.kv_dtypes) {
      options.kv_dtypes.push_back(parse_dtype_flag("--kv-dtypes", name));
    }
  }
  options.perplexity = !flags.no_perplexity;
  options.progress = show_progress;
  const std::vector<VerifyRow> rows = verify_model(options);
  clear_progress();
  const auto refused = [](const VerifyRow& row) { return !row.unsupported.empty(); };
  if (std::ranges::all_of(rows, refused)) {
    throw Error(ErrorCode::unsupported,
                rows.empty() ? "no backend supports this model with any of these KV dtypes; fovea "
                               "explain --model gives the reasons"
                             : rows.front().unsupported);
  }
  flags.json ? print_json(rows) : print_table(rows);
  for (const VerifyRow& row : rows) {
    if (row.unsupported.empty() && !row.pass) throw CLI::RuntimeError(1);
  }
}

}  // namespace

void add_check(CLI::App& program) {
  auto flags = std::make_shared<CheckFlags>();
  CLI::App* command = program.add_subcommand(
      "check", "compare a checkpoint with its reference outputs, for every backend and KV dtype");
  add_engine_flags(*command, flags->engine);
  add_rank_flags(*command, flags->ranks);
  add_comma_list(*command, "--backends,--backend", flags->backends,
                 "comma-separated; default: all that support the model");
  add_comma_list(*command, "--kv-dtypes,--kv-dtype", flags->kv_dtypes,
                 "comma-separated; default fp32,bf16,fp16,fp8_e4m3");
  command->add_flag("--no-perplexity", flags->no_perplexity, "compare prompts only");
  command->add_flag("--json", flags->json, "print the rows as JSON");
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
