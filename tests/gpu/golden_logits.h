// SPDX-License-Identifier: Apache-2.0
// Logits of the tiny checkpoints of testdata/goldens on GPUs.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "support/reference_file.h"

namespace fovea {

// The networks are random, so each has its own error limit: twice what the reference loses by
// rounding to bf16. The engine's contexts must hold 200 tokens.
inline void expect_golden_logits(Engine& engine, const std::string& model) {
  const SafetensorsFile file = reference_file(model);
  const std::vector<float> errors = values_of<float>(file, "bf16_error");
  const float budget = 2 * *std::ranges::max_element(errors);
  for (size_t i = 0; i < errors.size(); ++i) {
    const std::string prefix = "prompt_" + std::to_string(i);
    const std::vector<float> logits =
        engine.logits(values_of<int32_t>(file, prefix + ".input_ids"));
    const std::vector<float> want = values_of<float>(file, prefix + ".last_logits");
    float worst = 0;
    for (size_t v = 0; v < want.size(); ++v) {
      const float difference = std::fabs(logits[logits.size() - want.size() + v] - want[v]);
      worst = std::isnan(difference) ? std::numeric_limits<float>::infinity()
                                     : std::max(worst, difference);
    }
    EXPECT_LE(worst, budget) << prefix;
  }
}

}  // namespace fovea
