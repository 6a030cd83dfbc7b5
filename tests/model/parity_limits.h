// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fovea {

// The allowed distance of a model from Hugging Face transformers in eager fp32, with an fp32 cache.
struct ParityLimits {
  float logit = 2e-3f;       // largest absolute difference of a logit
  double perplexity = 1e-3;  // relative difference
};

}  // namespace fovea
