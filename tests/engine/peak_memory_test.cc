// SPDX-License-Identifier: Apache-2.0
// The whole process stays within its weights, its KV budget and 200 MB.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <vector>

#include "engine/reference_text.h"
#include "fovea/engine.h"

namespace fovea {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // shadow memory counts as resident
#else
constexpr bool kSanitized = false;
#endif

size_t peak_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<size_t>(usage.ru_maxrss) * 1024;
}

// Batches with default options: half of the machine's memory is reserved, and little of it is used.
TEST(PeakMemory, UntouchedPoolsCostNothing) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's own memory would be measured";
  size_t weights = 0;
  for (const char* model : kTestModels) {
    EngineOptions options;
    options.model_path = model_folder(model);
    options.threads = 2;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    weights = std::max(weights, engine->stats().memory.weights);
    std::vector<GenerateRequest> requests;
    for (const ReferencePrompt& prompt : read_reference(model)) {
      requests.push_back(greedy_request(prompt));
      requests.back().sampling.max_new_tokens = 4;
      requests.back().sampling.prompt_logprobs = true;
    }
    (void)engine->generate(requests);
    // 1200 tokens in flight take less than 16 MB of any cache.
    EXPECT_LT(peak_bytes(), weights + (size_t{16} << 20) + (size_t{200} << 20)) << model;
  }
}

}  // namespace
}  // namespace fovea
