// SPDX-License-Identifier: Apache-2.0
// Formats results of attention_suite.h as Markdown, CSV and JSON.
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "bench/attention_suite.h"
#include "fovea/device.h"

namespace fovea::bench {
namespace {

double gflops(const AttentionResult& result) {
  return result.config.flops() / result.seconds / 1e9;
}
double gbytes(const AttentionResult& result) {
  return result.config.bytes() / result.seconds / 1e9;
}

}  // namespace

std::string to_markdown(const std::vector<AttentionResult>& results) {
  std::string text = cpu_device().name + "\n\n";
  text +=
      "| phase | batch | q | kv | heads | dim | page | q dtype | kv dtype | backend | threads | ms "
      "| plan us | GFLOP/s | GB/s | of ceiling | FMA GFLOP/s | read GB/s | error |\n"
      "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | --- | ---: | ---: | ---: "
      "| ---: | ---: | ---: | ---: | ---: | ---: |\n";
  for (const AttentionResult& r : results) {
    text += fmt::format(
        "| {} | {} | {} | {} | {}/{} | {} | {} | {} | {} | {} | {} | {:.3f} | {:.1f} | {:.0f} "
        "| {:.1f} | {:.2f} {} | {:.0f} | {:.1f} | {:.1e} |\n",
        r.config.phase, r.config.batch, r.config.q_len, r.config.kv_len, r.config.q_heads,
        r.config.kv_heads, r.config.head_dim, r.config.page_size, dtype_name(r.config.q_dtype),
        dtype_name(r.config.kv_dtype), r.backend, r.threads, r.seconds * 1e3, r.plan_seconds * 1e6,
        gflops(r), gbytes(r), r.fraction, r.compute_bound ? "flops" : "read",
        r.ceilings.flops / 1e9, r.ceilings.read_bytes / 1e9, r.error);
  }
  return text;
}

std::string to_csv(const std::vector<AttentionResult>& results) {
  std::string text =
      "phase,batch,q_len,kv_len,q_heads,kv_heads,head_dim,page_size,q_dtype,kv_dtype,backend,"
      "threads,seconds,seconds_min,plan_seconds,gflops,gbytes,fraction,bound,error,peak_gflops,"
      "peak_gbytes\n";
  for (const AttentionResult& r : results) {
    text += fmt::format(
        "{},{},{},{},{},{},{},{},{},{},{},{},{:.6e},{:.6e},{:.6e},{:.2f},{:.3f},{:.4f},{},{:.2e},"
        "{:.1f},{:.2f}\n",
        r.config.phase, r.config.batch, r.config.q_len, r.config.kv_len, r.config.q_heads,
        r.config.kv_heads, r.config.head_dim, r.config.page_size, dtype_name(r.config.q_dtype),
        dtype_name(r.config.kv_dtype), r.backend, r.threads, r.seconds, r.seconds_min,
        r.plan_seconds, gflops(r), gbytes(r), r.fraction, r.compute_bound ? "flops" : "read",
        r.error, r.ceilings.flops / 1e9, r.ceilings.read_bytes / 1e9);
  }
  return text;
}

std::string to_json(const std::vector<AttentionResult>& results) {
  nlohmann::ordered_json report;
  report["machine"] = cpu_device().name;
  report["isa"] = cpu_device().isa;
  report["results"] = nlohmann::ordered_json::array();
  for (const AttentionResult& r : results) {
    report["results"].push_back({{"phase", r.config.phase},
                                 {"batch", r.config.batch},
                                 {"q_len", r.config.q_len},
                                 {"kv_len", r.config.kv_len},
                                 {"q_heads", r.config.q_heads},
                                 {"kv_heads", r.config.kv_heads},
                                 {"head_dim", r.config.head_dim},
                                 {"page_size", r.config.page_size},
                                 {"q_dtype", dtype_name(r.config.q_dtype)},
                                 {"kv_dtype", dtype_name(r.config.kv_dtype)},
                                 {"backend", r.backend},
                                 {"threads", r.threads},
                                 {"seconds", r.seconds},
                                 {"seconds_min", r.seconds_min},
                                 {"plan_seconds", r.plan_seconds},
                                 {"gflops", gflops(r)},
                                 {"gbytes", gbytes(r)},
                                 {"fraction", r.fraction},
                                 {"peak_flops", r.ceilings.flops},
                                 {"peak_read_bytes", r.ceilings.read_bytes},
                                 {"bound", r.compute_bound ? "flops" : "read"},
                                 {"error", r.error}});
  }
  return report.dump(2) + "\n";
}

}  // namespace fovea::bench
