// SPDX-License-Identifier: Apache-2.0
// The loaders behind models() that have a file of their own; plain_decoders.h has the others. All
// take ownership of the checkpoint and throw Error{corrupt_file} or Error{unsupported} where config
// and weights are not what they expect.
#pragma once

#include <memory>

#include "model/model.h"

namespace fovea {

std::unique_ptr<Model> load_gpt_oss(const Config&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_deepseek_v2(const Config&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_deepseek_v3(const Config&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_llama4_text(const Config&, Checkpoint, std::shared_ptr<ModelDevice>);
std::unique_ptr<Model> load_qwen3_next(const Config&, Checkpoint, std::shared_ptr<ModelDevice>);

}  // namespace fovea
