// SPDX-License-Identifier: Apache-2.0
// Prints the results of `generate` while they are generated.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "fovea/engine.h"

namespace fovea::cli {

enum class ResultFormat {
  stream,  // for one prompt: its text as it is generated
  lines,   // a numbered line per prompt
  json,    // a JSON object per prompt, each on one line
};

// Prints the results of requests in order. A result is printed when it and all previous ones are
// complete.
class ResultPrinter {
 public:
  // `requests` are the requests passed to Engine::generate() of a new engine. They must outlive the
  // printer. `shown` are the prompts' texts, which `stream` and `lines` print before the generated
  // text unless empty. Without `has_text`, both print token ids instead of text.
  ResultPrinter(std::span<const GenerateRequest> requests, std::vector<std::string> shown,
                ResultFormat format, bool has_text);

  void add(const TokenEvent& event);
  // After an exception, prints the partial results of unfinished requests as failed for that
  // reason. Prints nothing before the first event, since a refused request has no results, or if
  // printing itself threw.
  void fail_rest(const Engine& engine, const std::string& why);

  // Returns a line for each request that failed.
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  void print_complete();
  void print(size_t index);

  std::span<const GenerateRequest> requests_;
  std::vector<std::string> shown_;
  ResultFormat format_;
  bool has_text_;
  std::vector<GenerateResult> results_;
  std::vector<std::string> failures_;
  size_t next_ = 0;  // index of the first unprinted result
  bool has_events_ = false;
  bool started_ = false;      // stream: the prompt has been printed
  bool is_printing_ = false;  // true during a call that prints
};

}  // namespace fovea::cli
