// SPDX-License-Identifier: Apache-2.0
// Outputs of the reference implementation for the models of testdata.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "support/reference_file.h"

namespace fovea {

inline constexpr std::array<const char*, 7> kTestModels = {
    "llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next"};

struct ReferencePrompt {
  std::vector<int32_t> tokens;
  std::vector<int32_t> greedy;  // the next 64 tokens
  std::vector<float> last_logits;
};

// Five prompts of 7, 33, 150, 300 and 700 tokens.
inline std::vector<ReferencePrompt> read_reference(const std::string& model) {
  const SafetensorsFile file = reference_file(model);
  std::vector<ReferencePrompt> prompts;
  for (int i = 0; i < 5; ++i) {
    const std::string prefix = "prompt_" + std::to_string(i);
    prompts.push_back({values_of<int32_t>(file, prefix + ".input_ids"),
                       values_of<int32_t>(file, prefix + ".greedy_64"),
                       values_of<float>(file, prefix + ".last_logits")});
  }
  return prompts;
}

inline GenerateRequest greedy_request(const ReferencePrompt& prompt) {
  GenerateRequest request;
  request.tokens = prompt.tokens;
  request.sampling.max_new_tokens = static_cast<int32_t>(prompt.greedy.size());
  request.sampling.ignore_eos = true;
  return request;
}

}  // namespace fovea
