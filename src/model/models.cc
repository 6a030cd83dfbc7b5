// SPDX-License-Identifier: Apache-2.0
// The list of architectures, by the name a config gives in `architectures`.
#include <array>
#include <filesystem>
#include <string>

#include "core/check.h"
#include "model/architectures.h"
#include "model/model.h"

namespace fovea {

std::span<const ModelEntry> models() {
  static constexpr std::array kModels = {
      ModelEntry{"LlamaForCausalLM", load_llama},
      ModelEntry{"Qwen3ForCausalLM", load_qwen3},
      ModelEntry{"Gemma2ForCausalLM", load_gemma2},
      ModelEntry{"GptOssForCausalLM", load_gpt_oss},
      ModelEntry{"DeepseekV3ForCausalLM", load_deepseek_v3},
      ModelEntry{"Llama4ForCausalLM", load_llama4_text},
      ModelEntry{"Qwen3NextForCausalLM", load_qwen3_next},
  };
  return kModels;
}

std::unique_ptr<Model> load_model(const std::string& folder, ThreadPool& threads) {
  const Config config = Config::open((std::filesystem::path(folder) / "config.json").string());
  const std::vector<std::string> names = config.texts("architectures");
  for (const ModelEntry& entry : models()) {
    if (!names.empty() && names[0] == entry.architecture) {
      return entry.load(config, Checkpoint::open(folder), threads);
    }
  }
  std::string known;
  for (const ModelEntry& entry : models()) {
    known += known.empty() ? "" : ", ";
    known += entry.architecture;
  }
  fail(ErrorCode::unsupported, "{}: the architecture is '{}'; known are {}", folder,
       names.empty() ? "" : names[0], known);
}

}  // namespace fovea
