// SPDX-License-Identifier: Apache-2.0
// Judges text of a GPU by the exact logits of the CPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/reference_text.h"
#include "fovea/engine.h"
#include "support/error_budget.h"

namespace fovea {

inline EngineOptions gpu_options(const std::string& model) {
  EngineOptions options;
  options.model_path = model_folder(model);
  options.device = "cuda";
  options.kv_dtype = DType::bf16;
  options.kv_memory_bytes = size_t{64} << 20;
  options.max_context = 1024;
  options.max_requests = 8;
  options.max_batch_tokens = 200;
  options.threads = 2;
  return options;
}

class ExactText {
 public:
  explicit ExactText(std::string model) : model_(std::move(model)) {}

  // Expects the reference's tokens, or a first difference where the exact logits of both tokens are
  // closer than rounding to bf16 may move them. The tokens after it depend on that token.
  void expect_greedy(const ReferencePrompt& prompt, const std::vector<int32_t>& tokens,
                     const std::string& what) {
    ASSERT_EQ(tokens.size(), prompt.greedy.size()) << what;
    const auto [want, got] = std::ranges::mismatch(prompt.greedy, tokens);
    if (want == prompt.greedy.end()) return;
    std::vector<int32_t> text = prompt.tokens;
    text.insert(text.end(), prompt.greedy.begin(), want);
    const std::vector<float> logits = last_logits(text);
    EXPECT_LE(logits[static_cast<size_t>(*want)] - logits[static_cast<size_t>(*got)],
              2 * test::kBf16ModelLogits)
        << what << ": token " << want - prompt.greedy.begin() << " is " << *got << ", want "
        << *want;
  }

  // Expects the reference's texts of an engine, of all prompts together and of each alone.
  void expect_reference(Engine& engine) {
    const std::vector<ReferencePrompt> prompts = read_reference(model_);
    std::vector<GenerateRequest> requests;
    for (const ReferencePrompt& prompt : prompts) requests.push_back(greedy_request(prompt));
    const std::vector<GenerateResult> batched = engine.generate(requests);
    for (size_t i = 0; i < prompts.size(); ++i) {
      expect_greedy(prompts[i], batched[i].tokens, std::to_string(i) + " batched");
      const GenerateResult alone = engine.generate({&requests[i], 1}).front();
      expect_greedy(prompts[i], alone.tokens, std::to_string(i) + " alone");
    }
  }

 private:
  // Returns the logits of a text's last token from the fp32 engine.
  std::vector<float> last_logits(const std::vector<int32_t>& text) {
    if (!engine_) {
      EngineOptions options = gpu_options(model_);
      options.device = "cpu";
      options.kv_dtype = DType::f32;
      engine_ = Engine::load(options);
    }
    const std::vector<float> all = engine_->logits(text);
    return {all.end() - engine_->vocabulary(), all.end()};
  }

  std::string model_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace fovea
