// SPDX-License-Identifier: Apache-2.0
// Lists the architectures by the name that a config gives in `architectures`.
#include <array>
#include <filesystem>
#include <string>

#include "core/check.h"
#include "core/quote.h"
#include "model/architectures.h"
#include "model/model.h"
#include "model/plain_decoders.h"

namespace fovea {

std::span<const ModelEntry> models() {
  static constexpr std::array kModels = {
      ModelEntry{"LlamaForCausalLM", load_plain<kLlama>},
      ModelEntry{"MistralForCausalLM", load_plain<kMistral>},
      ModelEntry{"MixtralForCausalLM", load_plain<kMixtral>},
      ModelEntry{"Qwen2ForCausalLM", load_plain<kQwen2>},
      ModelEntry{"Qwen3ForCausalLM", load_plain<kQwen3>},
      ModelEntry{"Qwen3MoeForCausalLM", load_plain<kQwen3Moe>},
      ModelEntry{"Gemma2ForCausalLM", load_plain<kGemma2>},
      ModelEntry{"Gemma3ForCausalLM", load_plain<kGemma3>},
      ModelEntry{"Phi3ForCausalLM", load_plain<kPhi3>},
      ModelEntry{"Olmo2ForCausalLM", load_plain<kOlmo2>},
      ModelEntry{"GlmForCausalLM", load_plain<kGlm>},
      ModelEntry{"Glm4ForCausalLM", load_plain<kGlm4>},
      ModelEntry{"SmolLM3ForCausalLM", load_plain<kSmolLm3>},
      ModelEntry{"GraniteForCausalLM", load_plain<kGranite>},
      ModelEntry{"GraniteMoeHybridForCausalLM", load_granite_hybrid},
      ModelEntry{"GptOssForCausalLM", load_gpt_oss},
      ModelEntry{"DeepseekV2ForCausalLM", load_deepseek_v2},
      ModelEntry{"DeepseekV3ForCausalLM", load_deepseek_v3},
      ModelEntry{"Llama4ForCausalLM", load_llama4_text},
      ModelEntry{"Qwen3NextForCausalLM", load_qwen3_next},
      ModelEntry{"KimiLinearForCausalLM", load_kimi_linear},
      ModelEntry{"MambaForCausalLM", load_mamba},
      ModelEntry{"Lfm2ForCausalLM", load_lfm2},
      ModelEntry{"Lfm2MoeForCausalLM", load_lfm2_moe},
  };
  return kModels;
}

void Model::forward(const ModelInputs& inputs, std::span<AttentionBackend* const> backends,
                    std::span<float> logits) {
  const size_t rows = inputs.logit_rows.size();
  check_argument(logits.size() == rows * static_cast<size_t>(info().vocabulary),
                 "logits holds {} floats, must hold {} rows of {}", logits.size(), rows,
                 info().vocabulary);
  forward(inputs, backends);
  this->logits(0, logits);
}

std::unique_ptr<Model> load_model(const std::string& folder, ThreadPool& threads) {
  return load_model(folder, make_host_device(threads));
}

namespace {

bool is_config(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

}  // namespace

JsonObject read_config(const std::string& path) {
  if (is_config(path)) return JsonObject::open(path);
  return JsonObject::open((std::filesystem::path(path) / "config.json").string());
}

const ModelEntry& find_model(const JsonObject& config, const std::string& path) {
  const std::vector<std::string> names = config.texts("architectures");
  for (const ModelEntry& entry : models()) {
    if (names.empty() || names[0] != entry.architecture) continue;
    return entry;
  }
  std::string known;
  for (const ModelEntry& entry : models()) {
    known += known.empty() ? "" : ", ";
    known += entry.architecture;
  }
  fail(ErrorCode::unsupported, "{}: the architecture is {}; known are {}", printable(path),
       quote(names.empty() ? "" : names[0]), known);
}

std::unique_ptr<Model> load_model(const std::string& path, std::shared_ptr<ModelDevice> device,
                                  const std::optional<RandomSource>& random) {
  if (is_config(path) && !random) {
    fail(ErrorCode::invalid_argument,
         "{} is a file, so it has no weights: give the folder of a checkpoint, or make weights for "
         "this config with --random-weights SEED",
         printable(path));
  }
  const JsonObject config = read_config(path);
  const ModelEntry& entry = find_model(config, path);
  if (!random) return entry.load(config, Checkpoint::open(path), std::move(device));
  // Other files next to a config need not belong to it.
  const std::string folder = is_config(path) ? "" : path;
  return entry.load(config, Checkpoint::random(folder, config, random->seed, *random->threads),
                    std::move(device));
}

}  // namespace fovea
