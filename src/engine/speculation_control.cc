// SPDX-License-Identifier: Apache-2.0
#include "engine/speculation_control.h"

#include <algorithm>
#include <bit>

#include "engine/graph_sizes.h"

namespace fovea {
namespace {

constexpr double kFading = 0.9;     // weight of earlier steps: the last ten count for two thirds
constexpr double kMinGain = 1.02;   // smaller gains over steps without drafts are noise
constexpr int32_t kTrialSteps = 3;  // the first step of a width is slower and is not counted
constexpr int32_t kMinInterval = 16, kMaxInterval = 256;  // steps between trials

}  // namespace

bool SpeculationControl::Arm::measured() const { return steps >= kTrialSteps; }

SpeculationControl::SpeculationControl(int32_t max_drafts, bool always)
    : max_drafts_(max_drafts), always_(always) {}

SpeculationControl::Batch& SpeculationControl::batch(int32_t requests) {
  Batch& batch = batches_[std::bit_width(static_cast<uint32_t>(requests))];
  if (batch.arms.empty()) {
    for (const int32_t width : graph_widths(1 + max_drafts_)) {
      batch.arms.push_back({.width = width - 1});
    }
    batch.interval = kMinInterval;
  }
  return batch;
}

int32_t SpeculationControl::width(int32_t requests, bool only_decodes) {
  if (always_) return max_drafts_;
  Batch& steps = batch(requests);
  return steps.arms[only_decodes ? next_arm(steps) : steps.best].width;
}

size_t SpeculationControl::next_arm(Batch& batch) {
  if (!batch.arms.front().measured()) return 0;
  // Without a guess the step counts as one without drafts, and this costs nothing.
  if (!batch.arms.back().measured()) return batch.arms.size() - 1;
  if (batch.trial == 0 && ++batch.since_trial >= batch.interval) {
    batch.trial = kTrialSteps;
    batch.since_trial = 0;
    batch.tried = (batch.tried + 1) % batch.arms.size();
    if (batch.tried == batch.best) batch.tried = (batch.tried + 1) % batch.arms.size();
    batch.interval = std::min(2 * batch.interval, kMaxInterval);
  }
  if (batch.trial == 0) return batch.best;
  --batch.trial;
  return batch.tried;
}

void SpeculationControl::record(const DecodeStep& step) {
  Batch& steps = batch(step.requests);
  const int32_t width = step.drafts > 0 ? step.width : 0;
  const auto arm = std::ranges::find(steps.arms, width, &Arm::width);
  if (arm == steps.arms.end() || step.seconds <= 0) return;
  const double tokens = 1 + static_cast<double>(step.accepted) / step.requests;
  const Arm& plain = steps.arms.front();
  if (width > 0 && plain.measured()) {
    draft_seconds_ += step.seconds;
    plain_seconds_ += tokens / plain.rate();
  }
  if (arm->steps++ == 0) return;
  arm->tokens = kFading * arm->tokens + tokens;
  arm->seconds = kFading * arm->seconds + step.seconds;
  choose(steps);
}

void SpeculationControl::choose(Batch& batch) {
  if (!batch.arms.front().measured()) return;
  size_t best = 0;
  double fastest = kMinGain * batch.arms.front().rate();
  for (size_t i = 1; i < batch.arms.size(); ++i) {
    const Arm& arm = batch.arms[i];
    if (!arm.measured() || arm.rate() <= fastest) continue;
    best = i;
    fastest = arm.rate();
  }
  if (best != batch.best) batch.interval = kMinInterval;
  batch.best = best;
}

}  // namespace fovea
