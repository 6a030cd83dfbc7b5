// SPDX-License-Identifier: Apache-2.0
#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <iterator>

namespace fovea::server {
namespace {

constexpr double kTokenSeconds[] = {0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075,
                                    0.1,   0.15,   0.2,   0.3,  0.5,  1,    2.5};
constexpr double kRequestSeconds[] = {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,
                                      2.5,   5,    10,    30,   60,  120,  300};

double seconds(Metrics::Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

// Returns the processor time of the calling thread.
double thread_seconds() {
  timespec time{};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

constexpr std::array<std::string_view, 5> kEnds = {"none", "stop", "length", "abort", "error"};

void print_head(std::string_view name, std::string_view type, std::string_view help,
                std::string& out) {
  fmt::format_to(std::back_inserter(out), "# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type);
}

struct Value {
  std::string_view name, type, help;
  double value = 0;
};

}  // namespace

Histogram::Histogram(std::span<const double> bounds)
    : bounds_(bounds), counts_(bounds.size() + 1) {}

void Histogram::add(double value) {
  ++counts_[static_cast<size_t>(std::ranges::lower_bound(bounds_, value) - bounds_.begin())];
  sum_ += value;
}

void Histogram::print(std::string_view name, std::string_view help, std::string& out) const {
  print_head(name, "histogram", help, out);
  int64_t total = 0;
  for (size_t i = 0; i < bounds_.size(); ++i) {
    total += counts_[i];
    fmt::format_to(std::back_inserter(out), "{}_bucket{{le=\"{}\"}} {}\n", name, bounds_[i], total);
  }
  total += counts_.back();
  fmt::format_to(std::back_inserter(out),
                 "{0}_bucket{{le=\"+Inf\"}} {1}\n{0}_sum {2}\n{0}_count {1}\n", name, total, sum_);
}

Metrics::Metrics()
    : first_token_(kRequestSeconds), next_token_(kTokenSeconds), whole_(kRequestSeconds) {}

void Metrics::count_first_token(Clock::duration since_arrival) {
  ++output_tokens_;
  first_token_.add(seconds(since_arrival));
}

void Metrics::count_next_token(Clock::duration since_last) {
  ++output_tokens_;
  next_token_.add(seconds(since_last));
}

void Metrics::count_end(FinishReason finish, Clock::duration since_arrival) {
  ++ends_[static_cast<size_t>(finish)];
  whole_.add(seconds(since_arrival));
}

std::string Metrics::text(const ServiceStats& stats, int64_t connections) const {
  std::string out;
  const EngineStats& engine = stats.engine;
  const double pages = static_cast<double>(std::max<int64_t>(engine.kv_pages, 1));
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const Value values[] = {
      {"fovea_num_requests_running", "gauge", "Requests in the engine.", number(stats.running)},
      {"fovea_num_requests_waiting", "gauge", "Requests that wait for the engine.",
       number(stats.waiting)},
      {"fovea_kv_cache_usage_ratio", "gauge", "Share of the KV pages in use or cached.",
       number(engine.kv_pages - engine.kv_pages_free) / pages},
      {"fovea_http_connections", "gauge", "Open connections.", number(connections)},
      {"fovea_http_thread_seconds_total", "counter",
       "Processor time of the thread that serves HTTP.", thread_seconds()},
      {"fovea_healthy", "gauge", "0 after a failed pass.", stats.healthy ? 1.0 : 0.0},
      {"fovea_prompt_tokens_total", "counter", "Tokens of prompts.", number(prompt_tokens_)},
      {"fovea_generation_tokens_total", "counter", "Generated tokens.", number(output_tokens_)},
      {"fovea_prefix_cache_queries_total", "counter",
       "Prompt tokens looked up in the prefix cache.", number(engine.prefix_queries)},
      {"fovea_prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
       number(engine.prefix_hits)},
      {"fovea_preemptions_total", "counter", "Requests computed again for lack of pages.",
       number(engine.preemptions)},
      {"fovea_draft_tokens_total", "counter", "Guessed tokens that were verified.",
       number(engine.drafts)},
      {"fovea_accepted_draft_tokens_total", "counter", "Guessed tokens that became text.",
       number(engine.accepted_drafts)},
      {"fovea_engine_steps_total", "counter", "Passes of the engine.", number(engine.steps)},
      {"fovea_overlapped_steps_total", "counter", "Passes enqueued while another ran.",
       number(engine.overlapped_steps)},
      {"fovea_failed_passes_total", "counter", "Passes that failed.", number(stats.failed_passes)},
  };
  for (const Value& value : values) {
    print_head(value.name, value.type, value.help, out);
    fmt::format_to(std::back_inserter(out), "{} {}\n", value.name, value.value);
  }
  print_head("fovea_requests_total", "counter", "Finished choices by their end.", out);
  for (size_t i = 1; i < kEnds.size(); ++i) {
    fmt::format_to(std::back_inserter(out), "fovea_requests_total{{finish_reason=\"{}\"}} {}\n",
                   kEnds[i], ends_[i]);
  }
  print_head("fovea_http_answers_total", "counter", "HTTP answers by status.", out);
  for (const auto& [status, count] : answers_) {
    fmt::format_to(std::back_inserter(out), "fovea_http_answers_total{{status=\"{}\"}} {}\n",
                   status, count);
  }
  first_token_.print("fovea_time_to_first_token_seconds", "Time to a choice's first token.", out);
  next_token_.print("fovea_inter_token_latency_seconds", "Time between two tokens.", out);
  whole_.print("fovea_request_latency_seconds", "Time to the end of a choice.", out);
  return out;
}

}  // namespace fovea::server
