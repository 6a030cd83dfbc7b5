// SPDX-License-Identifier: Apache-2.0
// Widths of drafts over simulated steps: the fastest is found and left again, and the search costs
// little.
#include "engine/speculation_control.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace fovea {
namespace {

constexpr int32_t kMaxDrafts = 4;

// A machine whose step takes `base` seconds, `with_drafts` more with drafts, and `per_draft` more
// for each draft of a request. Each draft is accepted with this probability, if the one before is.
struct Machine {
  double base = 1, with_drafts = 0, per_draft = 0;
  double acceptance = 0;
};

struct Totals {
  double tokens = 0, seconds = 0;
  std::map<int32_t, int> widths;  // steps by width
  double rate() const { return tokens / seconds; }
};

Totals run(SpeculationControl& control, const Machine& machine, int steps, int32_t requests = 1) {
  Totals totals;
  double owed = 0;  // accepted tokens that are not whole yet
  for (int i = 0; i < steps; ++i) {
    const int32_t width = control.width(requests, true);
    double expected = 0, share = 1;
    for (int32_t draft = 0; draft < width; ++draft) expected += share *= machine.acceptance;
    owed += expected * requests;
    const auto accepted = static_cast<int32_t>(owed);
    owed -= accepted;
    const double seconds =
        machine.base + (width > 0 ? machine.with_drafts : 0) + machine.per_draft * width;
    control.record({.requests = requests,
                    .width = width,
                    .drafts = width * requests,
                    .accepted = accepted,
                    .seconds = seconds});
    ++totals.widths[width];
    totals.tokens += requests + accepted;
    totals.seconds += seconds;
  }
  return totals;
}

TEST(SpeculationControl, UsesTheFastestWidth) {
  struct Case {
    Machine machine;
    int32_t width;
  };
  const Case cases[] = {
      {{.per_draft = 0.01, .acceptance = 0.9}, 4},
      {{.per_draft = 0.3, .acceptance = 0.5}, 1},  // 1.5 / 1.3 > 1.75 / 1.6 > 1.94 / 2.2
      {{.per_draft = 0.01, .acceptance = 0}, 0},
      {{.with_drafts = 1, .acceptance = 0.4}, 0},     // 1.65 / 2 at most
      {{.with_drafts = 0.5, .acceptance = 0.9}, 4},   // one draft gains less: 1.9 / 1.5
      {{.per_draft = 0.01, .acceptance = 0.015}, 0},  // as fast as none, but for noise
  };
  for (const auto& [machine, width] : cases) {
    SCOPED_TRACE(testing::Message() << machine.per_draft << " " << machine.acceptance);
    SpeculationControl control(kMaxDrafts, false);
    (void)run(control, machine, 200, 16);
    const Totals totals = run(control, machine, 1000, 16);
    const auto most =
        std::ranges::max_element(totals.widths, {}, [](const auto& entry) { return entry.second; });
    EXPECT_EQ(most->first, width);
    EXPECT_GT(totals.widths.at(most->first), 950);
  }
}

// Trials of a width that takes twice as long cost less than two per cent of a thousand steps.
TEST(SpeculationControl, LosesLittleWhereNothingIsGained) {
  SpeculationControl control(kMaxDrafts, false);
  const Totals totals = run(control, {.per_draft = 0.25, .acceptance = 0.1}, 1000);
  EXPECT_GT(totals.rate(), 0.98);
  EXPECT_LT(totals.rate(), 1);
  EXPECT_GT(totals.widths.size(), 2u) << "no trials";
}

TEST(SpeculationControl, FollowsWhatChanges) {
  SpeculationControl control(kMaxDrafts, false);
  const Machine good{.per_draft = 0.02, .acceptance = 0.9};
  const Machine bad{.with_drafts = 0.3, .per_draft = 0.02, .acceptance = 0};
  for (int round = 0; round < 3; ++round) {
    EXPECT_GT(run(control, good, 1000).rate(), 2.5) << round;
    EXPECT_GT(run(control, bad, 1000).rate(), 0.97) << round;
  }
}

TEST(SpeculationControl, BatchesOfOtherSizesAreMeasuredApart) {
  SpeculationControl control(kMaxDrafts, false);
  const Machine few{.per_draft = 0.01, .acceptance = 0.8};
  const Machine many{.per_draft = 1, .acceptance = 0.8};
  for (int round = 0; round < 20; ++round) {
    (void)run(control, few, 30, 1);
    (void)run(control, many, 30, 64);
  }
  EXPECT_GT(control.width(1, false), 0);
  EXPECT_EQ(control.width(64, false), 0);
  EXPECT_EQ(control.width(100, false), 0) << "as 64";
}

TEST(SpeculationControl, StepsWithoutGuessesCostNothingAndAreNoDraftSteps) {
  SpeculationControl control(kMaxDrafts, false);
  for (int i = 0; i < 300; ++i) {
    const int32_t width = control.width(1, true);
    control.record({.requests = 1, .width = width, .drafts = 0, .accepted = 0, .seconds = 1});
  }
  EXPECT_EQ(control.gain(), 0);
  EXPECT_EQ(control.width(1, true), kMaxDrafts) << "the first guess is tried at once";
}

TEST(SpeculationControl, GainIsThatOfTheStepsWithDrafts) {
  SpeculationControl control(kMaxDrafts, false);
  (void)run(control, {.per_draft = 0.125, .acceptance = 1}, 2000);
  EXPECT_NEAR(control.gain(), 5 / 1.5, 0.05);
}

TEST(SpeculationControl, AlwaysMeansAlways) {
  SpeculationControl control(3, true);
  const Totals totals = run(control, {.with_drafts = 10}, 100);
  EXPECT_EQ(totals.widths.at(3), 100);
  EXPECT_EQ(control.gain(), 0) << "nothing to compare with";
}

}  // namespace
}  // namespace fovea
