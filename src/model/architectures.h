// SPDX-License-Identifier: Apache-2.0
// Loaders of architectures that have their own file; plain_decoders.h has the others. All take
// ownership of the checkpoint. They throw Error{corrupt_file} or Error{unsupported} if config or
// weights are not what they expect.
#pragma once

#include <memory>

#include "model/model.h"

namespace fovea {

std::unique_ptr<Model> load_gpt_oss(const JsonObject&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_deepseek_v2(const JsonObject&, Checkpoint,
                                        std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_deepseek_v3(const JsonObject&, Checkpoint,
                                        std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_kimi_linear(const JsonObject&, Checkpoint,
                                        std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_lfm2(const JsonObject&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_lfm2_moe(const JsonObject&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_llama4_text(const JsonObject&, Checkpoint,
                                        std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_granite_hybrid(const JsonObject&, Checkpoint,
                                           std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_mamba(const JsonObject&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_qwen3_next(const JsonObject&, Checkpoint, std::shared_ptr<ModelDevice>);

}  // namespace fovea
