// SPDX-License-Identifier: Apache-2.0
// Requests with a JSON schema, and conversations.
#include <algorithm>

#include "core/check.h"
#include "engine/text_engine.h"

namespace fovea {

std::shared_ptr<const grammar::Grammar> TextEngine::compile_schema(
    const SamplingParams& sampling) const {
  if (sampling.json_schema.empty()) return nullptr;
  tokenizer();
  return grammars_->compile(sampling.json_schema);
}

// Returns no mask if there is no schema.
grammar::TokenMask TextEngine::allowed_tokens(const Grammar& grammar) const {
  grammar::TokenMask allowed;
  if (!grammar) return allowed;
  grammar->mask(static_cast<size_t>(vocabulary()), allowed);
  if (grammar->is_complete()) {
    for (const int32_t token : end_tokens()) grammar::allow(token, allowed);
  }
  return allowed;
}

// Returns true if the token ends the value of the schema.
bool TextEngine::read_by_grammar(Grammar& grammar, int32_t token) const {
  if (!grammar || std::ranges::find(end_tokens(), token) != end_tokens().end()) return false;
  if (!grammar->accept(parts_.tokenizer->token_bytes(token)))
    fail(ErrorCode::invalid_argument, "json_schema: it nests values too deeply for token {}",
         token);
  return !grammar->may_continue();
}

std::vector<int32_t> TextEngine::encode_conversation(const Conversation& conversation) const {
  return tokenizer().encode_bare(parts_.chat.render(conversation));
}

}  // namespace fovea
