// SPDX-License-Identifier: Apache-2.0
// The messages of a chat, as the tokens of a prompt.
#pragma once

#include <cstdint>
#include <vector>

#include "fovea/engine.h"
#include "server/fields.h"

namespace fovea::server {

// Reads `messages`. Throws ApiError 400 naming the message, or Error if the checkpoint's chat
// format cannot express them.
std::vector<int32_t> read_messages(Fields& body, const Engine& engine);

}  // namespace fovea::server
