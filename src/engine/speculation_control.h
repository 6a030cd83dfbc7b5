// SPDX-License-Identifier: Apache-2.0
// Decides how many drafts a step verifies, by what earlier steps yielded and how long they took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace fovea {

// A step that computed one token each of `requests` requests, and drafts after some of them.
struct DecodeStep {
  int32_t requests = 0;
  int32_t width = 0;  // max drafts of a request, as width() gave it
  int32_t drafts = 0, accepted = 0;
  double seconds = 0;  // with the time in which drafts were made
};

// Compares widths of 0, 1, 2, 4 ... max_drafts by their tokens per second, for batches of similar
// size apart. Each width is tried now and then: at first after a few steps, and half as often each
// time that another one remains the fastest. A width above 0 is used if it gains something.
class SpeculationControl {
 public:
  // With `always`, every step has max_drafts.
  SpeculationControl(int32_t max_drafts, bool always);

  // Returns the max number of drafts of each request in the next step. Steps that also compute
  // prompts are not measured: `only_decodes` is false, and no width is tried.
  int32_t width(int32_t requests, bool only_decodes);
  void record(const DecodeStep& step);
  // Returns the tokens per second of steps with drafts, divided by those of steps without them; 0
  // if one of them was not measured.
  double gain() const { return draft_seconds_ > 0 ? plain_seconds_ / draft_seconds_ : 0; }

 private:
  // The recent steps of one width.
  struct Arm {
    int32_t width = 0;
    int32_t steps = 0;
    double tokens = 0, seconds = 0;  // fading sums: tokens per request, seconds per step
    bool measured() const;
    double rate() const { return tokens / seconds; }
  };
  // The steps of a power of two of requests and up to twice as many.
  struct Batch {
    std::vector<Arm> arms;  // by width, which begins with 0
    size_t best = 0;
    size_t tried = 0;         // the arm tried last
    int32_t trial = 0;        // remaining steps of a trial
    int32_t since_trial = 0;  // steps since the last one
    int32_t interval = 0;     // steps until the next one
  };

  Batch& batch(int32_t requests);
  static size_t next_arm(Batch& batch);
  static void choose(Batch& batch);

  int32_t max_drafts_;
  bool always_;
  std::map<int32_t, Batch> batches_;  // by the number of bits of the number of requests
  // Seconds of steps with drafts, and those that other steps would have needed for their tokens.
  double draft_seconds_ = 0, plain_seconds_ = 0;
};

}  // namespace fovea
