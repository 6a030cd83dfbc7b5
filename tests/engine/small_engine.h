// SPDX-License-Identifier: Apache-2.0
// A small engine over a checkpoint of testdata, and helpers of the tests that use it.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/reference_text.h"
#include "fovea/engine.h"

namespace fovea {

inline EngineOptions small_options(const std::string& model = "llama") {
  EngineOptions options;
  options.model_path = model_folder(model);
  options.kv_memory_bytes = size_t{32} << 20;
  options.max_context = 256;
  options.max_requests = 4;
  options.max_batch_tokens = 64;
  options.threads = 1;
  return options;
}

inline GenerateRequest text_request(const std::string& prompt, int32_t new_tokens) {
  GenerateRequest request;
  request.prompt = prompt;
  request.sampling.max_new_tokens = new_tokens;
  request.sampling.ignore_eos = true;
  return request;
}

inline const std::string kPrompt = "And it came to pass in the days of";

inline void expect_no_leak(Engine& engine) {
  EXPECT_TRUE(engine.idle());
  engine.clear_prefix_cache();
  EXPECT_EQ(engine.stats().kv_pages_free, engine.stats().kv_pages);
}

// One engine for all tests that do not change it.
inline Engine& shared_engine() {
  static const std::unique_ptr<Engine> engine = Engine::load(small_options());
  return *engine;
}

}  // namespace fovea
