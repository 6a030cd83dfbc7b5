// SPDX-License-Identifier: Apache-2.0
// Reads the steps of a tokenizer.json that rewrite texts, split texts and join tokens. Throws
// Error{unsupported} naming any unknown step and any unsupported option that would change ids.
#pragma once

#include <optional>
#include <string_view>

#include "model/json_object.h"
#include "tokenizer/decoder.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pre_tokenizer.h"

namespace fovea {

// `name` is the file.
Normalizer read_normalizer(const JsonObject& item, std::string_view name);
PreTokenizer read_pre_tokenizer(const JsonObject& item, std::string_view name);
// Without a decoder, decoding puts spaces between tokens.
Decoder read_decoder(const std::optional<JsonObject>& item, std::string_view name);

}  // namespace fovea
