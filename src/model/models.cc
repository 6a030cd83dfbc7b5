// SPDX-License-Identifier: Apache-2.0
// The list of architectures, by the name a config gives in `architectures`.
#include <array>
#include <filesystem>
#include <string>

#include "core/check.h"
#include "core/quote.h"
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
      ModelEntry{"Qwen3NextForCausalLM", load_qwen3_next, "linear layers have no GPU backend yet"},
  };
  return kModels;
}

std::unique_ptr<Model> load_model(const std::string& folder, ThreadPool& threads) {
  return load_model(folder, make_host_device(threads));
}

Config read_config(const std::string& folder) {
  return Config::open((std::filesystem::path(folder) / "config.json").string());
}

const ModelEntry& find_model(const Config& config, const std::string& folder, DeviceKind device) {
  const std::vector<std::string> names = config.texts("architectures");
  for (const ModelEntry& entry : models()) {
    if (names.empty() || names[0] != entry.architecture) continue;
    if (device == DeviceKind::cuda && !entry.not_on_gpus.empty()) {
      fail(ErrorCode::unsupported, "{}: {} runs on the CPU only: {}", printable(folder),
           entry.architecture, entry.not_on_gpus);
    }
    return entry;
  }
  std::string known;
  for (const ModelEntry& entry : models()) {
    known += known.empty() ? "" : ", ";
    known += entry.architecture;
  }
  fail(ErrorCode::unsupported, "{}: the architecture is {}; known are {}", printable(folder),
       quote(names.empty() ? "" : names[0]), known);
}

std::unique_ptr<Model> load_model(const std::string& folder, std::shared_ptr<ModelDevice> device) {
  const Config config = read_config(folder);
  const ModelEntry& entry = find_model(config, folder, device->kind());
  return entry.load(config, Checkpoint::open(folder), std::move(device));
}

}  // namespace fovea
