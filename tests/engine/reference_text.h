// SPDX-License-Identifier: Apache-2.0
// What the reference implementation makes of the models in testdata.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "fovea/engine.h"
#include "model/safetensors.h"

namespace fovea {

inline constexpr std::array<const char*, 7> kTestModels = {
    "llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next"};

struct ReferencePrompt {
  std::vector<int32_t> tokens;
  std::vector<int32_t> greedy;  // the 64 tokens that follow
  std::vector<float> last_logits;
};

inline std::string model_folder(const std::string& name) {
  return std::string(FOVEA_SOURCE_DIR) + "/testdata/models/" + name;
}

template <typename T>
std::vector<T> read_tensor(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor& tensor = file.tensors().at(name);
  std::vector<T> values(tensor.bytes / sizeof(T));
  std::memcpy(values.data(), tensor.data, tensor.bytes);
  return values;
}

// Five prompts of 7, 33, 150, 300 and 700 tokens.
inline std::vector<ReferencePrompt> read_reference(const std::string& model) {
  const auto file = SafetensorsFile::open(model_folder(model) + "/reference.safetensors");
  std::vector<ReferencePrompt> prompts;
  for (int i = 0; i < 5; ++i) {
    const std::string prefix = "prompt_" + std::to_string(i);
    prompts.push_back({read_tensor<int32_t>(file, prefix + ".input_ids"),
                       read_tensor<int32_t>(file, prefix + ".greedy_64"),
                       read_tensor<float>(file, prefix + ".last_logits")});
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
