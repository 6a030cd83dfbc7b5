// SPDX-License-Identifier: Apache-2.0
// Counts what the server does, in the text format of Prometheus.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/engine_service.h"

namespace fovea::server {

class Histogram {
 public:
  // `bounds` ascend and must outlive this.
  explicit Histogram(std::span<const double> bounds);
  void add(double value);
  void print(std::string_view name, std::string_view help, std::string& out) const;

 private:
  std::span<const double> bounds_;
  std::vector<int64_t> counts_;  // one more than bounds
  double sum_ = 0;
};

// All members are for the server's thread.
class Metrics {
 public:
  using Clock = std::chrono::steady_clock;

  Metrics();
  void count_answer(int status) { ++answers_[status]; }
  void count_prompts(int64_t tokens) { prompt_tokens_ += tokens; }
  void count_first_token(Clock::duration since_arrival);
  void count_next_token(Clock::duration since_last);
  void count_end(FinishReason finish, Clock::duration since_arrival);

  std::string text(const ServiceStats& stats, int64_t connections) const;

 private:
  std::map<int, int64_t> answers_;    // by HTTP status
  std::array<int64_t, 5> ends_ = {};  // by FinishReason
  int64_t prompt_tokens_ = 0, output_tokens_ = 0;
  Histogram first_token_, next_token_, whole_;
};

}  // namespace fovea::server
