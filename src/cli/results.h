// SPDX-License-Identifier: Apache-2.0
// How `generate` prints what it generates, as it comes.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "fovea/engine.h"

namespace fovea::cli {

enum class ResultFormat {
  stream,  // of one prompt: its text as it grows
  lines,   // a numbered line for each prompt
  json,    // an object on a line for each prompt
};

// Prints the results of requests in their order, each as soon as it and all before it are complete.
class ResultPrinter {
 public:
  // `requests` are those of Engine::generate() of a new engine, and outlive this. `shown` are their
  // texts, which stream and lines print in front of what was generated; empty ones are not shown.
  // Without `has_text` both print token ids instead of text.
  ResultPrinter(std::span<const GenerateRequest> requests, std::vector<std::string> shown,
                ResultFormat format, bool has_text);

  void add(const TokenEvent& event);
  // After an exception: prints what the unfinished requests have, as failed for that reason.
  // Nothing before the first event, as a refused request begins none, and nothing where the
  // exception came out of printing.
  void fail_rest(const Engine& engine, const std::string& why);

  // A line for each request that failed.
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
  size_t next_ = 0;  // the first that is not printed
  bool has_events_ = false;
  bool started_ = false;      // stream: the prompt is printed
  bool is_printing_ = false;  // and has not returned
};

}  // namespace fovea::cli
