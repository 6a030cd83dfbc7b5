// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <charconv>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "model/json.h"
#include "model/json_object.h"
#include "tokenizer/tokenizer_document.h"
#include "tokenizer/tokenizer_files.h"

namespace fovea {
namespace {

using nlohmann::json;

// Chat templates and other texts may be long.
constexpr JsonLimits kLimits = {.bytes = 64'000'000, .depth = 32};
constexpr std::array<const char*, 7> kNamed = {"bos_token", "eos_token", "unk_token", "sep_token",
                                               "pad_token", "cls_token", "mask_token"};

AddedToken read_token(const JsonObject& item) {
  AddedToken token;
  token.content = item.text("content");
  token.special = item.boolean_or("special", false);
  token.normalized = item.boolean_or("normalized", !token.special);
  token.single_word = item.boolean_or("single_word", false);
  token.lstrip = item.boolean_or("lstrip", false);
  token.rstrip = item.boolean_or("rstrip", false);
  if (token.content.empty() || token.content.size() > kMaxAddedBytes) {
    item.refuse("content", fmt::format("a text of 1 to {} bytes", kMaxAddedBytes));
  }
  return token;
}

int32_t read_id(const JsonObject& tokens, const std::string& key) {
  int32_t id = 0;
  const auto [rest, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  if (error != std::errc{} || rest != key.data() + key.size() || id < 0 || id >= kMaxTokens) {
    tokens.refuse(key, fmt::format("under an id from 0 to {}", kMaxTokens - 1));
  }
  return id;
}

}  // namespace

TokenizerSettings read_tokenizer_settings(std::string_view text, std::string_view name) {
  const JsonObject root = JsonObject::parse(text, name, kLimits);
  TokenizerSettings settings;
  if (root.has("add_bos_token")) settings.add_bos = root.boolean_or("add_bos_token", false);
  if (root.has("add_eos_token")) settings.add_eos = root.boolean_or("add_eos_token", false);
  if (root.has("added_tokens_decoder")) {
    const JsonObject tokens = root.object("added_tokens_decoder");
    for (const std::string& key : tokens.fields()) {
      AddedToken token = read_token(tokens.object(key));
      token.id = read_id(tokens, key);
      settings.added.push_back(std::move(token));
    }
    std::ranges::sort(settings.added, {}, &AddedToken::id);
  }
  for (const char* field : kNamed) {
    if (!root.has(field)) continue;
    AddedToken token;
    const json& value = root.value(field);
    if (value.is_object()) {
      token = read_token(root.object(field));
    } else {
      token.content = root.text(field);
      if (token.content.empty() || token.content.size() > kMaxAddedBytes) continue;
    }
    token.special = true;
    for (AddedToken& added : settings.added) {
      if (added.content == token.content) added.special = true;
    }
    settings.named.push_back(std::move(token));
  }
  return settings;
}

std::vector<AddedToken> with_settings(std::vector<AddedToken> tokens, const Vocabulary& vocabulary,
                                      const TokenizerSettings& settings, std::string_view name) {
  std::unordered_map<std::string, size_t> known;
  int32_t next = vocabulary.size();
  for (size_t i = 0; i < tokens.size(); ++i) {
    known.emplace(tokens[i].content, i);
    next = std::max(next, tokens[i].id + 1);
  }
  const auto add = [&](const AddedToken& token) {
    known.emplace(token.content, tokens.size());
    tokens.push_back(token);
    next = std::max(next, token.id + 1);
  };
  for (const AddedToken& token : settings.added) {
    const auto found = known.find(token.content);
    if (found == known.end()) {
      add(token);
      continue;
    }
    AddedToken& there = tokens[found->second];
    if (there.id != token.id) {
      fail(ErrorCode::corrupt_file, "{}: added token {} has id {}, tokenizer_config.json says {}",
           name, quote(token.content), there.id, token.id);
    }
    there = token;
  }
  for (AddedToken token : settings.named) {
    if (known.contains(token.content)) continue;
    const int32_t id = vocabulary.find(token.content);
    token.id = id == Vocabulary::kNone ? next : id;
    add(token);
  }
  return tokens;
}

}  // namespace fovea
