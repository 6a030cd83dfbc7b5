// SPDX-License-Identifier: Apache-2.0
// Figures and pictures of what an engine did, for `bench engine`.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "fovea/engine.h"

namespace fovea::cli {

// One request: when it arrived and when each of its tokens did, in seconds since the first arrival.
struct RequestTimes {
  double arrival = 0;
  int32_t prompt_tokens = 0;
  std::vector<double> tokens;
};

// Passes without a pause: between two stretches the engine had no request.
using StepStretch = std::vector<StepRecord>;

// Returns the times of requests, each of which has a token, as named figures.
nlohmann::ordered_json request_figures(std::span<const RequestTimes> requests);
// Returns the times of passes as named figures; null where there is none. With `on_cpu`, passes run
// while they are enqueued, which is not counted as work of the host.
nlohmann::ordered_json step_figures(std::span<const StepStretch> stretches, bool on_cpu);

// Prints figures as "md", "csv" or "json".
void print_figures(const nlohmann::ordered_json& figures, const std::string& output);

// Writes the passes in the trace format of Chrome, which chrome://tracing and Perfetto show. Throws
// Error{io} naming the file.
void write_trace(const std::string& path, std::span<const StepStretch> stretches);

}  // namespace fovea::cli
