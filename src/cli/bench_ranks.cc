// SPDX-License-Identifier: Apache-2.0
// The command `bench ranks`.
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/gpu_ranks.h"
#include "cli/bench_gpu.h"
#include "cli/commands.h"

namespace fovea::cli {
namespace {

struct RankFlags {
  bench::RankBenchOptions options;
  std::string output = "md";
};

// Times that were not measured are null.
nlohmann::ordered_json figure(double microseconds) {
  if (microseconds < 0) return nullptr;
  return microseconds;
}

nlohmann::ordered_json exchange_rows(const bench::RankFigures& figures) {
  nlohmann::ordered_json rows = nlohmann::json::array();
  for (const bench::ContextTime& time : figures.exchanges) {
    rows.push_back({{"shape", time.shape},
                    {"query_bytes", time.query_bytes},
                    {"state_bytes", time.state_bytes},
                    {"own_queries_us", figure(time.own_queries)},
                    {"own_states_us", figure(time.own_states)},
                    {"nccl_queries_us", figure(time.nccl_queries)},
                    {"nccl_states_us", figure(time.nccl_states)}});
  }
  return rows;
}

nlohmann::ordered_json layer_rows(const bench::RankFigures& figures) {
  nlohmann::ordered_json rows = nlohmann::json::array();
  for (const bench::ContextLayerTime& time : figures.layers) {
    rows.push_back({{"requests", time.requests},
                    {"kv_len", time.kv_len},
                    {"one_us", time.one},
                    {"ranks_us", time.ranks},
                    {"worst", time.worst}});
  }
  return rows;
}

std::string cell(double microseconds) {
  return microseconds < 0 ? std::string("-") : fmt::format("{:.2f}", microseconds);
}

nlohmann::ordered_json decoder_rows(const bench::RankFigures& figures) {
  nlohmann::ordered_json rows = nlohmann::json::array();
  for (const bench::DecoderLayerTime& time : figures.decoder_layers) {
    rows.push_back({{"rows", time.rows},
                    {"one_us", time.one},
                    {"ranks_us", time.ranks},
                    {"worst", time.worst}});
  }
  return rows;
}

void print_decoder_layers(const bench::RankFigures& figures) {
  fmt::print(
      "\n| rows of a layer of Qwen3-8B without attention | one GPU, us | all, us | ratio |\n"
      "| ---: | ---: | ---: | ---: |\n");
  for (const bench::DecoderLayerTime& time : figures.decoder_layers) {
    fmt::print("| {} | {:.2f} | {:.2f} | {:.3f} |\n", time.rows, time.one, time.ranks,
               time.ranks / time.one);
  }
}

void print_contexts(const bench::RankFigures& figures) {
  fmt::print(
      "\n| exchange | bytes of queries | own, us | NCCL, us | bytes of states | own, us |"
      " NCCL, us |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
  for (const bench::ContextTime& time : figures.exchanges) {
    fmt::print("| {} | {} | {} | {} | {} | {} | {} |\n", time.shape, time.query_bytes,
               cell(time.own_queries), cell(time.nccl_queries), time.state_bytes,
               cell(time.own_states), cell(time.nccl_states));
  }
  fmt::print(
      "\n| MLA of 128 heads | one GPU, us | all, us | ratio |\n"
      "| --- | ---: | ---: | ---: |\n");
  for (const bench::ContextLayerTime& time : figures.layers) {
    fmt::print("| {} x {} | {:.2f} | {:.2f} | {:.3f} |\n", time.requests, time.kv_len, time.one,
               time.ranks, time.ranks / time.one);
  }
}

void run(const RankFlags& flags) {
  const bench::RankFigures figures = bench::measure_ranks(flags.options);
  if (flags.output == "json") {
    nlohmann::ordered_json rows = nlohmann::json::array();
    for (const bench::RankSumTime& time : figures.times) {
      rows.push_back({{"bytes", time.bytes},
                      {"nccl_us", figure(time.nccl)},
                      {"sums_us", figure(time.sums)},
                      {"gather_us", figure(time.gather)}});
    }
    const nlohmann::ordered_json all = {{"ranks", flags.options.ranks},
                                        {"copy_gbps", figures.copy_gbps},
                                        {"times", rows},
                                        {"decoder_layers", decoder_rows(figures)},
                                        {"exchanges", exchange_rows(figures)},
                                        {"layers", layer_rows(figures)}};
    fmt::print("{}\n", all.dump(2));
    return;
  }
  fmt::print("{} ranks; copies from GPU to GPU: {:.1f} GB/s\n\n", flags.options.ranks,
             figures.copy_gbps);
  fmt::print("| bytes of a rank | sum, NCCL, us | sum, own, us | gather, NCCL, us |\n");
  fmt::print("| ---: | ---: | ---: | ---: |\n");
  for (const bench::RankSumTime& time : figures.times) {
    fmt::print("| {} | {} | {} | {} |\n", time.bytes, cell(time.nccl), cell(time.sums),
               cell(time.gather));
  }
  print_decoder_layers(figures);
  print_contexts(figures);
}

}  // namespace

void add_bench_ranks(CLI::App& bench) {
  auto flags = std::make_shared<RankFlags>();
  CLI::App* command = bench.add_subcommand(
      "ranks", "measure sums and exchanges over several GPUs, by NCCL and by kernels of Fovea");
  command->add_option("--ranks", flags->options.ranks, "GPUs, from the first on")
      ->capture_default_str()
      ->check(CLI::Range(2, 64));
  command->add_option("--output,-o", flags->output, "md or json")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json"}));
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
