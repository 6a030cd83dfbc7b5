// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_gpu.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>

#include "bench/gpu_report.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "fovea/error.h"
#include "fovea/gpu.h"

namespace fovea::cli {
namespace {

using bench::GpuCase;
using bench::GpuReport;
using bench::GpuResult;
using bench::GpuSuite;
using bench::PowerState;

int gpu_index(const std::string& name) {
  const DeviceInfo device = find_device(name);
  if (device.kind == DeviceKind::cuda) return device.index;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("--device is '{}', accepted: cuda, cuda:N", name));
}

PowerState power_state(const std::string& name) {
  return name == "burst" ? PowerState::burst : PowerState::sustained;
}

std::vector<GpuCase> chosen_cases(const GpuBenchFlags& flags,
                                  const std::optional<bench::AttentionCase>& one_case) {
  if (one_case) return {bench::gpu_case(*one_case)};
  std::vector<GpuCase> cases = bench::gpu_cases(flags.suite == "quick"   ? GpuSuite::quick
                                                : flags.suite == "table" ? GpuSuite::table
                                                                         : GpuSuite::full);
  if (!flags.filters.empty()) {
    std::erase_if(cases, [&](const GpuCase& config) {
      return std::ranges::none_of(flags.filters, [&](const std::string& part) {
        return config.name().find(part) != std::string::npos;
      });
    });
  }
  if (cases.empty()) {
    throw Error(ErrorCode::invalid_argument, "--filter matches no case of the suite");
  }
  return cases;
}

// Times the first case that the backend supports. Throws the last error if it supports none.
bench::FirstCall first_call(bench::GpuBench& gpu, const std::vector<GpuCase>& cases,
                            const BackendWish& wish) {
  for (const GpuCase& config : cases) {
    try {
      return gpu.first_call(config, wish);
    } catch (const Error&) {
      if (&config == &cases.back()) throw;
    }
  }
  return {};
}

void add_peers(const GpuBenchFlags& flags, const std::optional<bench::PeerTable>& table,
               GpuReport& report) {
  std::vector<GpuCase> timed;
  for (GpuResult& result : report.results) {
    if (!result.timed()) continue;
    timed.push_back(result.config);
    if (table) result.peers = table->find(result.config, report.state, report.ceilings);
  }
  if (!flags.peers || InterruptCatcher::caught() != 0) return;
  const auto measured =
      bench::run_peers(flags.peers_script, flags.peer_kinds, timed, report.state, show_progress);
  for (GpuResult& result : report.results) {
    const auto found = measured.find(result.config.name());
    if (found == measured.end()) continue;
    result.peers.insert(result.peers.end(), found->second.begin(), found->second.end());
  }
}

// Checks before the measurement, which takes minutes.
void check_savable(const std::string& prefix) {
  std::filesystem::path folder = std::filesystem::path(prefix).parent_path();
  if (folder.empty()) folder = ".";
  std::error_code unknown;
  if (!std::filesystem::is_directory(folder, unknown) || access(folder.c_str(), W_OK) != 0) {
    throw Error(ErrorCode::io,
                fmt::format("--save {}: {} is not a writable folder", prefix, folder.string()));
  }
}

void save(const GpuReport& report, const std::string& prefix, bool one_state) {
  const std::string stem =
      one_state ? prefix : fmt::format("{}.{}", prefix, power_state_name(report.state));
  for (const auto& [ending, text] : {std::pair{".md", bench::to_markdown(report)},
                                     {".csv", bench::to_csv({&report, 1})},
                                     {".json", bench::to_json({&report, 1})},
                                     {".svg", bench::to_svg(report)}}) {
    std::ofstream file(stem + ending);
    file << text;
    if (!file.flush()) {
      throw Error(ErrorCode::io, fmt::format("{}{} cannot be written", stem, ending));
    }
  }
}

}  // namespace

void add_gpu_options(CLI::App& attention, GpuBenchFlags& flags) {
  attention.add_option("--device", flags.device, "cpu, cuda or cuda:N")->capture_default_str();
  attention
      .add_option("--suite", flags.suite,
                  "cases on a GPU: quick (one of each kind), table, or full (all sizes; soft caps, "
                  "windows, ALiBi, sinks, masks)")
      ->capture_default_str()
      ->check(CLI::IsMember({"quick", "table", "full"}));
  add_comma_list(attention, "--filter", flags.filters,
                 "on a GPU: only cases whose name contains one of these");
  add_comma_list(attention, "--state", flags.states,
                 "state of the GPU: burst (after an idle gap), sustained (1.5 s of work), or both",
                 CLI::IsMember({"burst", "sustained"}));
  CLI::Option* peers = attention.add_flag(
      "--peers", flags.peers, "on a GPU: run PyTorch's attention on the same cases (needs torch)");
  attention.add_option("--peer-kinds", flags.peer_kinds, "PyTorch implementations to run")
      ->capture_default_str()
      ->needs(peers);
  attention.add_option("--peers-script", flags.peers_script, "script that runs them")
      ->capture_default_str()
      ->needs(peers);
  attention.add_option("--baselines", flags.baselines,
                       "on a GPU: CSV with times of other libraries for comparison");
  attention.add_option("--save", flags.save,
                       "on a GPU: also write PREFIX.md, .csv, .json and the roofline .svg");
}

void add_gpu_ceilings(CLI::App& bench) {
  auto flags = std::make_shared<GpuBenchFlags>();
  auto output = std::make_shared<std::string>("md");
  flags->device = "cuda";
  CLI::App* ceilings = bench.add_subcommand(
      "ceilings", "measure the GPU's limits: bandwidths, matrix products, launches");
  ceilings->add_option("--device", flags->device, "cuda or cuda:N")->capture_default_str();
  ceilings->add_option("--output,-o", *output, "md or json (an array for several --state)")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "json"}));
  add_comma_list(*ceilings, "--state", flags->states,
                 "burst (after an idle gap), sustained, or both",
                 CLI::IsMember({"burst", "sustained"}));
  ceilings->callback([flags, output] {
    bench::GpuBench gpu(gpu_index(flags->device));
    std::vector<GpuReport> reports;
    for (const std::string& name : flags->states) {
      show_progress(fmt::format("measuring this GPU's ceilings, {}", name));
      GpuReport report{.device = gpu.device(), .state = power_state(name)};
      report.ceilings = gpu.ceilings(report.state);
      clear_progress();
      if (*output == "md") fmt::print("{}", bench::ceilings_markdown(report));
      reports.push_back(std::move(report));
    }
    if (*output == "json") fmt::print("{}", bench::to_json(reports));
  });
}

void run_gpu_bench(const GpuBenchFlags& flags, const std::string& backend,
                   const std::string& output, const std::optional<bench::AttentionCase>& one_case) {
  const std::vector<GpuCase> cases = chosen_cases(flags, one_case);
  const BackendWish wish = parse_backend_wish(backend);
  std::optional<bench::PeerTable> table;
  if (flags.baselines) table = bench::PeerTable::open(*flags.baselines);
  if (flags.save) check_savable(*flags.save);
  bench::GpuBench gpu(gpu_index(flags.device));
  show_progress("first call");
  const bench::FirstCall first = first_call(gpu, cases, wish);
  const InterruptCatcher catcher;
  bool wrong = false;
  std::vector<GpuReport> reports;
  for (const std::string& name : flags.states) {
    GpuReport report{.device = gpu.device(), .state = power_state(name), .first = first};
    show_progress(fmt::format("measuring this GPU's ceilings, {}", name));
    report.ceilings = gpu.ceilings(report.state);
    for (const GpuCase& config : cases) {
      show_progress(fmt::format("[{}/{}] {} {}", report.results.size() + 1, cases.size(), name,
                                config.name()));
      report.results.push_back(gpu.run(config, wish, report.state, report.ceilings));
      wrong = wrong || !report.results.back().error.problem.empty();
      if (InterruptCatcher::caught() != 0) break;
    }
    add_peers(flags, table, report);
    clear_progress();
    if (output == "md") fmt::print("{}", bench::to_markdown(report));
    if (flags.save) save(report, *flags.save, flags.states.size() == 1);
    reports.push_back(std::move(report));
    if (InterruptCatcher::caught() != 0) break;
  }
  if (output == "csv") fmt::print("{}", bench::to_csv(reports));
  if (output == "json") fmt::print("{}", bench::to_json(reports));
  end_if_interrupted();
  if (wrong) {
    print_note("fovea: an output was wrong\n");
    throw CLI::RuntimeError(1);
  }
}

}  // namespace fovea::cli
