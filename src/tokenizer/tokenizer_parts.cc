// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tokenizer_parts.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/quote.h"

namespace fovea {

bool TokenizerParts::has(int32_t token) const {
  return added_texts_.contains(token) || vocabulary().has(token);
}

std::string_view TokenizerParts::text(int32_t token) const {
  const auto added = added_texts_.find(token);
  return added != added_texts_.end() ? added->second.text : vocabulary().text(token);
}

bool TokenizerParts::is_special(int32_t token) const {
  const auto added = added_texts_.find(token);
  return added != added_texts_.end() && added->second.special;
}

int32_t TokenizerParts::size() const { return std::max(vocabulary().size(), added_size_); }

void TokenizerParts::set_added_tokens(std::vector<AddedToken> tokens, std::string_view name) {
  const Vocabulary& known = vocabulary();
  std::unordered_map<std::string_view, int32_t> ids;
  for (const AddedToken& token : tokens) {
    const std::string shown = quote(token.content);
    if (!ids.emplace(token.content, token.id).second) {
      fail(ErrorCode::corrupt_file, "{}: added token {} is there twice", name, shown);
    }
    const int32_t id = known.find(token.content);
    if (id != Vocabulary::kNone && id != token.id) {
      fail(ErrorCode::corrupt_file, "{}: added token {} has id {}, in the vocabulary it is {}",
           name, shown, token.id, id);
    }
    if (id == Vocabulary::kNone && has(token.id)) {
      fail(ErrorCode::corrupt_file, "{}: id {} is used by {} and the added token {}", name,
           token.id, quote(text(token.id)), shown);
    }
    added_texts_.emplace(token.id, AddedText{token.content, token.special});
    added_size_ = std::max(added_size_, token.id + 1);
  }
  std::vector<AddedToken> raw, normalized;
  for (AddedToken& token : tokens) {
    if (!token.normalized) {
      raw.push_back(std::move(token));
      continue;
    }
    std::string text = normalizer.apply(token.content, false).text;
    if (text != token.content) {
      // Like the reference, decodes to the text that is searched for, and recognises special tokens
      // by it.
      added_texts_[token.id] = {text, false};
      token.content = std::move(text);
    }
    if (!token.content.empty()) normalized.push_back(std::move(token));
  }
  raw_added = AddedTokenFinder(std::move(raw));
  normalized_added = AddedTokenFinder(std::move(normalized));
}

}  // namespace fovea
