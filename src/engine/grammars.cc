// SPDX-License-Identifier: Apache-2.0
#include "engine/grammars.h"

#include <algorithm>

namespace fovea {

std::shared_ptr<const grammar::Grammar> Grammars::compile(const std::string& schema) {
  const std::lock_guard lock(mutex_);
  const auto known =
      std::ranges::find(kept_, schema, [](const auto& entry) { return entry.first; });
  if (known != kept_.end()) {
    std::rotate(known, known + 1, kept_.end());
    return kept_.back().second;
  }
  if (tokens_ == nullptr) {
    std::vector<std::string> bytes(static_cast<size_t>(vocabulary_));
    for (int32_t token = 0; token < std::min(vocabulary_, tokenizer_.size()); ++token) {
      if (tokenizer_.special_text(token).empty())
        bytes[static_cast<size_t>(token)] = tokenizer_.token_bytes(token);
    }
    tokens_ = std::make_shared<const grammar::TokenTrie>(bytes);
  }
  const auto grammar = std::make_shared<const grammar::Grammar>(schema, tokens_);
  if (kept_.size() == kKept) kept_.erase(kept_.begin());
  kept_.emplace_back(schema, grammar);
  return grammar;
}

}  // namespace fovea
