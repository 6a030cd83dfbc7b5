// SPDX-License-Identifier: Apache-2.0
#include "cli/bench_engine_report.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <optional>
#include <system_error>

#include "fovea/error.h"

namespace fovea::cli {
namespace {

using nlohmann::ordered_json;

// Returns the value at the fraction `share` of the sorted values, times `factor`, or null without
// values.
ordered_json percentile(std::vector<double> values, double share, double factor) {
  if (values.empty()) return nullptr;
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1));
  std::ranges::nth_element(values, values.begin() + static_cast<int64_t>(at));
  return values[at] * factor;
}

// Returns null if there is nothing to divide by.
ordered_json ratio(int64_t part, int64_t whole) {
  if (whole == 0) return nullptr;
  return static_cast<double>(part) / static_cast<double>(whole);
}

constexpr int kHostTrack = 1, kDeviceTrack = 2;

ordered_json track_name(int track, const char* name) {
  return {
      {"name", "thread_name"}, {"ph", "M"}, {"pid", 1}, {"tid", track}, {"args", {{"name", name}}}};
}

ordered_json span_event(int track, const std::string& name, double begin, double end,
                        const StepRecord& step) {
  constexpr double kMicroseconds = 1e6;
  return {{"name", name},
          {"ph", "X"},
          {"pid", 1},
          {"tid", track},
          {"ts", begin * kMicroseconds},
          {"dur", (end - begin) * kMicroseconds},
          {"args",
           {{"step", step.step},
            {"requests", step.requests},
            {"tokens", step.tokens},
            {"decodes", step.decodes},
            {"drafts", step.drafts},
            {"accepted_drafts", step.accepted_drafts},
            {"overlapped", step.overlapped}}}};
}

}  // namespace

ordered_json request_figures(std::span<const RequestTimes> requests) {
  std::vector<double> first, between;
  double prompts_end = 0, end = 0, prompt_tokens = 0, output_tokens = 0;
  for (const RequestTimes& request : requests) {
    const std::vector<double>& times = request.tokens;
    first.push_back(times.front() - request.arrival);
    for (size_t i = 1; i < times.size(); ++i) between.push_back(times[i] - times[i - 1]);
    prompts_end = std::max(prompts_end, times.front());
    end = std::max(end, times.back());
    prompt_tokens += request.prompt_tokens;
    output_tokens += static_cast<double>(times.size());
  }
  return {{"first_token_p50_ms", percentile(first, 0.5, 1e3)},
          {"first_token_p99_ms", percentile(first, 0.99, 1e3)},
          {"between_tokens_p50_ms", percentile(between, 0.5, 1e3)},
          {"between_tokens_p99_ms", percentile(between, 0.99, 1e3)},
          {"prompt_tokens_per_s", prompt_tokens / prompts_end},
          {"output_tokens_per_s", output_tokens / end}};
}

ordered_json step_figures(std::span<const StepStretch> stretches, bool on_cpu) {
  std::vector<double> host, decode, mixed;
  double busy = 0, total = 0;
  int64_t steps = 0, overlapped = 0, draft_steps = 0, draft_requests = 0, drafts = 0, accepted = 0;
  for (const StepStretch& stretch : stretches) {
    const StepRecord* before = nullptr;
    for (const StepRecord& step : stretch) {
      ++steps;
      overlapped += step.overlapped;
      draft_steps += step.drafts > 0;
      draft_requests += step.draft_requests;
      drafts += step.drafts;
      accepted += step.accepted_drafts;
      const double device = step.device_end - step.device_begin;
      busy += device;
      const double run = on_cpu ? std::min(device, step.enqueue_end - step.enqueue_begin) : 0;
      host.push_back(step.host_seconds() - run);
      const bool decodes = step.decodes == step.requests;
      if (before != nullptr && decodes && before->requests == step.requests) {
        decode.push_back(step.deliver_end - before->deliver_end);
      }
      if (before != nullptr && step.decodes > 0 && !decodes) {
        mixed.push_back(step.deliver_end - before->deliver_end);
      }
      before = &step;
    }
    if (before != nullptr) total += before->device_end - stretch.front().device_begin;
  }
  return {{"steps", steps},
          {"overlapped_steps", overlapped},
          {"draft_steps", draft_steps},
          {"drafts_per_request", ratio(drafts, draft_requests)},
          {"accepted_share", ratio(accepted, drafts)},
          {"decode_step_p50_ms", percentile(decode, 0.5, 1e3)},
          {"decode_step_p99_ms", percentile(decode, 0.99, 1e3)},
          {"mixed_steps", mixed.size()},
          {"mixed_step_p50_ms", percentile(mixed, 0.5, 1e3)},
          {"mixed_step_p99_ms", percentile(mixed, 0.99, 1e3)},
          {"host_step_p50_us", percentile(host, 0.5, 1e6)},
          {"host_step_p99_us", percentile(host, 0.99, 1e6)},
          {"device_idle_share", total > 0 ? ordered_json(1 - busy / total) : nullptr}};
}

void print_figures(const ordered_json& figures, const std::string& output) {
  if (output == "json") {
    fmt::print("{}\n", figures.dump());
    return;
  }
  const auto text = [](const ordered_json& value) {
    return value.is_number_float() ? fmt::format("{:.3f}", value.get<double>())
           : value.is_null()       ? std::string("-")
                                   : value.dump();
  };
  if (output == "md") {
    fmt::print("| figure | value |\n| --- | ---: |\n");
    for (const auto& [name, value] : figures.items())
      fmt::print("| {} | {} |\n", name, text(value));
    return;
  }
  std::string names, values;
  for (const auto& [name, value] : figures.items()) {
    const char* const comma = names.empty() ? "" : ",";
    names += comma + name;
    values += comma + text(value);
  }
  fmt::print("{}\n{}\n", names, values);
}

void write_trace(const std::string& path, std::span<const StepStretch> stretches) {
  ordered_json events = ordered_json::array();
  events.push_back(track_name(kHostTrack, "host"));
  events.push_back(track_name(kDeviceTrack, "device"));
  for (const StepStretch& stretch : stretches) {
    for (const StepRecord& step : stretch) {
      const auto on_host = [&](const char* name, double begin, double end) {
        events.push_back(span_event(kHostTrack, name, begin, end, step));
      };
      on_host("schedule", step.schedule_begin, step.enqueue_begin);
      on_host("enqueue", step.enqueue_begin, step.enqueue_end);
      on_host("wait", step.wait_begin, step.wait_end);
      on_host("deliver", step.wait_end, step.deliver_end);
      events.push_back(span_event(kDeviceTrack,
                                  fmt::format("{} x {} tokens", step.requests, step.tokens),
                                  step.device_begin, step.device_end, step));
    }
  }
  std::ofstream file(path);
  file << ordered_json{{"traceEvents", std::move(events)}}.dump() << '\n';
  file.close();
  if (!file) {
    throw Error(ErrorCode::io,
                fmt::format("--trace {}: {}", path, std::generic_category().message(errno)));
  }
}

}  // namespace fovea::cli
