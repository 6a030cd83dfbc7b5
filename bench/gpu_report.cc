// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

namespace fovea::bench {
namespace {

double tflops(const GpuResult& r) { return r.config.flops() / r.forward.seconds / 1e12; }
double gbps(const GpuResult& r) { return r.config.bytes() / r.forward.seconds / 1e9; }
double of_floor(const GpuResult& r) { return r.floor_seconds / r.forward.seconds; }

std::string microseconds(double seconds) {
  return seconds > 0 ? fmt::format("{:.1f}", seconds * 1e6) : "";
}

// Returns the peer's name, time and ratio, for example "FA3 12.6 1.05" with a unit. Above 1, Fovea
// is faster.
std::string versus(const GpuResult& r, const std::optional<PeerTime>& peer) {
  if (!peer) return "";
  return fmt::format("{:.2f} {} {:.1f}{}", peer->seconds / r.forward.seconds, peer->name,
                     peer->seconds * 1e6,
                     peer->page_size ? fmt::format(" p{}", peer->page_size) : "");
}

const GpuResult* timed_result(const std::vector<GpuResult>& results, const std::string& name) {
  for (const GpuResult& r : results) {
    if (r.timed() && r.config.name() == name) return &r;
  }
  return nullptr;
}

// Compares one launch of prompts and decodes with a launch of each.
std::string mixed_line(const std::vector<GpuResult>& results) {
  const GpuResult* both = timed_result(results, "mixed 2x4k+64x8k h32/8 d128 p64");
  const GpuResult* prompts = timed_result(results, "prefill-causal 2x4k h32/8 d128 p64");
  const GpuResult* decodes = timed_result(results, "decode 64x8k h32/8 d128 p64");
  if (!both || !prompts || !decodes) return "";
  const double apart = prompts->forward.seconds + decodes->forward.seconds;
  return fmt::format(
      "Mixed 2x4k+64x8k: {:.1f} us in one launch, {:.1f} us one after the other, {:.2f} times "
      "faster.\n",
      both->forward.seconds * 1e6, apart * 1e6, apart / both->forward.seconds);
}

// Returns times of the cases with `suffix` in their name, relative to the same cases without it.
std::string suffix_line(const std::vector<GpuResult>& results, std::string_view suffix,
                        std::string_view label) {
  std::string text;
  for (const GpuResult& r : results) {
    const std::string name = r.config.name();
    if (!r.timed() || !name.ends_with(suffix)) continue;
    const std::string plain = name.substr(0, name.size() - suffix.size());
    if (const GpuResult* base = timed_result(results, plain)) {
      text += fmt::format("{}{} {:.2f}", text.empty() ? "" : ", ", plain,
                          r.forward.seconds / base->forward.seconds);
    }
  }
  return text.empty() ? "" : fmt::format("{}: {}.\n", label, text);
}

// Compares page sizes for the same work: slowest over fastest.
std::string pages_line(const std::vector<GpuResult>& results) {
  // Shortest and longest time by the name without the page size.
  std::map<std::string, std::pair<double, double>> spread;
  for (const GpuResult& r : results) {
    if (!r.timed() || !r.config.cached()) continue;
    std::string name = r.config.name();
    const std::string page = fmt::format(" p{}", r.config.page_size);
    name.erase(name.find(page), page.size());
    auto [entry, is_new] = spread.try_emplace(name, r.forward.seconds, r.forward.seconds);
    auto& [shortest, longest] = entry->second;
    shortest = std::min(shortest, r.forward.seconds);
    longest = std::max(longest, r.forward.seconds);
  }
  std::string text;
  for (const auto& [name, bounds] : spread) {
    if (bounds.first == bounds.second) continue;
    text +=
        fmt::format("{}{} {:.2f}", text.empty() ? "" : ", ", name, bounds.second / bounds.first);
  }
  return text.empty() ? "" : fmt::format("Slowest over fastest page size: {}.\n", text);
}

// Turns lines a and b into "a; b".
std::string joined_lines(const std::string& lines) {
  std::istringstream in(lines);
  std::string text;
  for (std::string line; std::getline(in, line);) text += (text.empty() ? "" : "; ") + line;
  return text;
}

// Returns a line for each reason for which cases did not run.
std::string refused_lines(const std::vector<GpuResult>& results) {
  std::map<std::string, std::vector<std::string>> cases;  // cases by reason
  for (const GpuResult& r : results) {
    if (!r.refused.empty()) cases[joined_lines(r.refused)].push_back(r.config.name());
  }
  std::string text;
  for (const auto& [reason, names] : cases) {
    text +=
        fmt::format("Refused: {}{}: {}.\n", names.front(),
                    names.size() == 1 ? "" : fmt::format(" and {} more", names.size() - 1), reason);
  }
  return text;
}

std::string csv_rows(const GpuReport& report) {
  std::string text;
  for (const GpuResult& r : report.results) {
    text += fmt::format("{},{},{},{},", r.config.name(), r.config.phase,
                        power_state_name(report.state), r.backend);
    if (!r.timed()) {
      std::string note = r.refused + r.error.problem;
      for (char& c : note) {
        if (c == ',' || c == '\n') c = ';';
      }
      text += fmt::format(",,,,,,,,{:.2f},,,,,,,,,,,,,{:.2e},{:.2e},{}\n", r.floor_seconds * 1e6,
                          r.error.relative, r.error.worst_row, note);
      continue;
    }
    text += fmt::format("{:.3f},{:.3f},{},{:d},{:.2f},{:.1f},{},{:.4f},{:.3f},{:.4f},",
                        r.forward.seconds * 1e6, r.forward.seconds_min * 1e6, r.forward.samples,
                        r.forward.graph, tflops(r), gbps(r), r.compute_bound ? "flops" : "read",
                        r.ceiling_fraction, r.floor_seconds * 1e6, of_floor(r));
    const auto same = best_peer_with_page(r.peers, r.config.page_size);
    const auto any = best_peer(r.peers);
    text += same ? fmt::format("{},{:.3f},{:d},{:.4f},", same->name, same->seconds * 1e6,
                               same->measured, same->seconds / r.forward.seconds)
                 : ",,,,";
    text += any ? fmt::format("{},{:.3f},{:.4f},", any->name, any->seconds * 1e6,
                              any->seconds / r.forward.seconds)
                : ",,,";
    text += fmt::format("{:.3f},{:.3f},{:.3f},{:.3f},{:.2e},{:.2e},\n", r.eager_seconds * 1e6,
                        r.plan_seconds * 1e6, r.host_seconds * 1e6, r.host_plan_seconds * 1e6,
                        r.error.relative, r.error.worst_row);
  }
  return text;
}

nlohmann::ordered_json to_object(const GpuReport& report) {
  const GpuCeilings& c = report.ceilings;
  nlohmann::ordered_json json;
  json["device"] = report.device.name;
  json["state"] = power_state_name(report.state);
  json["ceilings"] = {{"read_bytes", c.read_bytes},
                      {"bulk_read_bytes", c.bulk_read_bytes},
                      {"copy_bytes", c.copy_bytes},
                      {"matmul_flops", c.matmul_flops},
                      {"fp8_matmul_flops", c.fp8_matmul_flops},
                      {"empty_seconds", c.empty_seconds},
                      {"launch_seconds", c.launch_seconds}};
  if (!report.first.config.empty()) {
    json["first_call"] = {{"case", report.first.config},
                          {"context_seconds", report.first.context_seconds},
                          {"pack_seconds", report.first.pack_seconds},
                          {"create_seconds", report.first.create_seconds},
                          {"forward_seconds", report.first.forward_seconds}};
  }
  json["results"] = nlohmann::ordered_json::array();
  for (const GpuResult& r : report.results) {
    nlohmann::ordered_json row = {{"case", r.config.name()},
                                  {"phase", r.config.phase},
                                  {"floor_seconds", r.floor_seconds},
                                  {"flops", r.config.flops()},
                                  {"bytes", r.config.bytes()}};
    if (!r.refused.empty()) row["refused"] = r.refused;
    if (!r.error.problem.empty()) row["wrong"] = r.error.problem;
    if (r.timed()) {
      row.update({{"backend", r.backend},
                  {"seconds", r.forward.seconds},
                  {"seconds_min", r.forward.seconds_min},
                  {"samples", r.forward.samples},
                  {"graph", r.forward.graph},
                  {"bound", r.compute_bound ? "flops" : "read"},
                  {"of_ceiling", r.ceiling_fraction},
                  {"of_floor", of_floor(r)},
                  {"eager_seconds", r.eager_seconds},
                  {"plan_seconds", r.plan_seconds},
                  {"host_seconds", r.host_seconds},
                  {"host_plan_seconds", r.host_plan_seconds},
                  {"error", r.error.relative},
                  {"worst_row", r.error.worst_row}});
    }
    row["peers"] = nlohmann::ordered_json::array();
    for (const PeerTime& peer : r.peers) {
      row["peers"].push_back({{"name", peer.name},
                              {"seconds", peer.seconds},
                              {"page_size", peer.page_size},
                              {"measured", peer.measured}});
    }
    json["results"].push_back(row);
  }
  return json;
}

}  // namespace

std::string ceilings_markdown(const GpuReport& report) {
  const GpuCeilings& c = report.ceilings;
  return fmt::format(
      "{}, {}: read {:.2f} TB/s (bulk copies {:.2f}), copy {:.2f} TB/s, bf16 product {:.0f} "
      "TFLOP/s, e4m3 product {:.0f} TFLOP/s, empty kernel {:.2f} us in a graph, {:.2f} us of host "
      "time per launch\n",
      report.device.name, power_state_name(report.state), c.read_bytes / 1e12,
      c.bulk_read_bytes / 1e12, c.copy_bytes / 1e12, c.matmul_flops / 1e12,
      c.fp8_matmul_flops / 1e12, c.empty_seconds * 1e6, c.launch_seconds * 1e6);
}

std::string to_markdown(const GpuReport& report) {
  std::string text = ceilings_markdown(report);
  text += fmt::format(
      "First call ({}): context {:.0f} ms, kernel pack {:.1f} ms, backend with its kernels {:.1f} "
      "ms, first pass {:.2f} "
      "ms\n\n",
      report.first.config, report.first.context_seconds * 1e3, report.first.pack_seconds * 1e3,
      report.first.create_seconds * 1e3, report.first.forward_seconds * 1e3);
  text +=
      "| case | backend | us | TFLOP/s | GB/s | of ceiling | of floor | best peer, same pages | "
      "any pages | eager us | plan us | host us forward, plan | error |\n"
      "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- | ---: | ---: | ---: | ---: |\n";
  for (const GpuResult& r : report.results) {
    if (!r.refused.empty()) continue;
    if (!r.error.problem.empty()) {
      text += fmt::format("| {} | {} | WRONG: {} | | | | | | | | | | |\n", r.config.name(),
                          r.backend, r.error.problem);
      continue;
    }
    text += fmt::format(
        "| {} | {} | {} | {:.0f} | {:.0f} | {:.2f} {} | {:.2f} | {} | {} | {} | {} | {} {} | "
        "{:.1e} |\n",
        r.config.name(), r.backend, microseconds(r.forward.seconds), tflops(r), gbps(r),
        r.ceiling_fraction, r.compute_bound ? "flops" : "read", of_floor(r),
        versus(r, best_peer_with_page(r.peers, r.config.page_size)), versus(r, best_peer(r.peers)),
        microseconds(r.eager_seconds), microseconds(r.plan_seconds), microseconds(r.host_seconds),
        microseconds(r.host_plan_seconds), r.error.relative);
  }
  return text + "\n" + mixed_line(report.results) +
         suffix_line(report.results, " invariant", "Batch-invariant over default") +
         suffix_line(report.results, " cascade",
                     "Shared prefix read once over read by each request") +
         suffix_line(report.results, " fp8-kv", "fp8 cache over bf16 cache") +
         pages_line(report.results) + refused_lines(report.results);
}

std::string to_csv(std::span<const GpuReport> reports) {
  std::string text =
      "case,phase,state,backend,us,us_min,samples,graph,tflops,gbps,bound,of_ceiling,floor_us,"
      "of_floor,peer,peer_us,peer_measured,ratio,any_page_peer,any_page_us,any_page_ratio,eager_us,"
      "plan_us,host_us,host_plan_us,error,worst_row,note\n";
  for (const GpuReport& report : reports) text += csv_rows(report);
  return text;
}

std::string to_json(std::span<const GpuReport> reports) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const GpuReport& report : reports) json.push_back(to_object(report));
  return (json.size() == 1 ? json[0] : json).dump(2) + "\n";
}

}  // namespace fovea::bench
