// SPDX-License-Identifier: Apache-2.0
// Tables of what can be wrong with a batch, and what plan() says of it.
#pragma once

#include <functional>
#include <vector>

#include "attention/two_requests.h"

namespace fovea::test {

struct Symptom {
  const char* words;  // the message holds them
  std::function<void(TwoRequests&)> cause;
};

inline void expect_symptoms(
    const std::vector<Symptom>& symptoms,
    const std::function<void(TwoRequests&)>& prepare = [](TwoRequests&) {}) {
  {
    TwoRequests healthy;
    prepare(healthy);
    healthy.create();
    healthy.backend->plan(healthy.batch);
  }
  for (const Symptom& symptom : symptoms) {
    TwoRequests fixture;
    prepare(fixture);
    fixture.create();
    fixture.backend->plan(fixture.batch);  // which the refused one must not leave behind
    symptom.cause(fixture);
    expect_invalid(symptom.words, [&] { fixture.backend->plan(fixture.batch); });
    EXPECT_EQ(error_of([&] { fixture.backend->forward({}); }), "forward() without a plan");
  }
}

}  // namespace fovea::test
