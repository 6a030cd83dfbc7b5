// SPDX-License-Identifier: Apache-2.0
// The steps of a tokenizer.json: what rewrites and splits texts, and what joins tokens. Every step
// that is not known, or an option that would change ids, is Error{unsupported} by its name.
#pragma once

#include <optional>
#include <string_view>

#include "model/config.h"
#include "tokenizer/decoder.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/pre_tokenizer.h"

namespace fovea {

// `name` is the file.
Normalizer read_normalizer(const Config& item, std::string_view name);
PreTokenizer read_pre_tokenizer(const Config& item, std::string_view name);
// Without a decoder the texts of tokens have spaces between them.
Decoder read_decoder(const std::optional<Config>& item, std::string_view name);

}  // namespace fovea
