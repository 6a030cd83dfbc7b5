// SPDX-License-Identifier: Apache-2.0
// The functions that the fuzzers run. Invalid bytes throw Error; any other failure aborts. The
// ordinary tests run the same functions over the committed corpus.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/error.h"
#include "fovea/tool_calls.h"
#include "model/checkpoint_index.h"
#include "model/json_object.h"
#include "model/safetensors.h"
#include "tokenizer/chat_template/read_json.h"
#include "tokenizer/chat_template/template.h"
#include "tokenizer/grammar/grammar.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/utf8.h"

namespace fovea::fuzz {

inline void require(bool condition) {
  if (!condition) std::abort();
}

// Every byte of every tensor lies in the file.
inline void read_safetensors(std::span<const uint8_t> data) {
  const auto file = SafetensorsFile::parse(std::as_bytes(data), "fuzz.safetensors");
  for (const auto& [name, tensor] : file.tensors()) {
    const auto* begin = reinterpret_cast<const uint8_t*>(tensor.data);
    require(begin >= data.data() && begin + tensor.bytes <= data.data() + data.size());
    size_t elements = 1;
    for (const int64_t dimension : tensor.shape) elements *= static_cast<size_t>(dimension);
    require(elements * dtype_bytes(tensor.dtype) == tensor.bytes);
    require(file.find(name) == &tensor);
  }
}

// Calls every accessor on every field: it returns a value or throws an Error.
inline void read_config(const JsonObject& config) {
  for (const std::string& field : config.fields()) {
    const std::array<std::function<void()>, 10> accessors = {
        [&] { require(std::abs(config.integer(field, -5, 5)) <= 5); },
        [&] { config.integer_or(field, 0, INT64_MIN, INT64_MAX); },
        [&] { config.number_or(field, 0, -5, 5); },
        [&] { config.boolean_or(field, true); },
        [&] { config.text_or(field, ""); },
        [&] { config.texts(field); },
        [&] { config.integers(field, 0, 9); },
        [&] { config.integer_or_list(field, 0, 9); },
        [&] { read_config(config.object(field)); },
        [&] {
          for (const JsonObject& object : config.objects(field)) read_config(object);
        }};
    for (const auto& access : accessors) {
      try {
        access();
      } catch (const Error& error) {
        require(error.code() == ErrorCode::corrupt_file);
      }
    }
  }
}

inline void read_config(std::span<const uint8_t> data) {
  const std::string_view text(reinterpret_cast<const char*>(data.data()), data.size());
  read_config(JsonObject::parse(text, "fuzz.json"));
}

// Every entry names a shard of the list, in order.
inline void read_index(std::span<const uint8_t> data) {
  const std::string_view text(reinterpret_cast<const char*>(data.data()), data.size());
  const CheckpointIndex index = read_checkpoint_index(text, "fuzz.index.json");
  require(!index.entries.empty());
  for (size_t i = 0; i < index.entries.size(); ++i) {
    require(index.entries[i].shard < index.shards.size());
    require(i == 0 || index.entries[i - 1].tensor < index.entries[i].tensor);
  }
}

// Encodes and decodes a text with several tokenizers.
inline void encode_text(std::string_view text) {
  static const std::array<Tokenizer, 3> tokenizers = {
      Tokenizer::open(FOVEA_SOURCE_DIR "/testdata/tokenizer/llama3.json"),
      Tokenizer::open(FOVEA_SOURCE_DIR "/testdata/tokenizer/gpt4o.json"),
      Tokenizer::open(FOVEA_SOURCE_DIR "/testdata/models/llama/tokenizer.json")};
  for (const Tokenizer& tokenizer : tokenizers) {
    const std::string back = tokenizer.decode(tokenizer.encode(text));
    // Decoding leaves out special tokens.
    if (text.find("<|") == text.npos) require(back == replace_broken_utf8(text));
  }
}

inline void expect_tokens(const Tokenizer& tokenizer, std::string_view text) {
  const auto tokens = tokenizer.encode(text);
  for (const int32_t token : tokens) require(token >= 0 && token < tokenizer.size());
  const std::string back = tokenizer.decode(tokens);
  require(replace_broken_utf8(back) == back);
}

// A file that starts with '{' is a tokenizer.json, a zero byte, and a text for it. Any other file
// is a text.
inline void read_tokenizer(std::span<const uint8_t> data) {
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
  if (!bytes.starts_with('{')) return encode_text(bytes);
  const size_t end = std::min(bytes.find('\0'), bytes.size());
  const auto tokenizer = Tokenizer::parse(bytes.substr(0, end), "fuzz.json");
  expect_tokens(tokenizer, bytes.substr(std::min(end + 1, bytes.size())));
}

// A tokenizer.model, which is also the text that it encodes.
inline void read_sentencepiece(std::span<const uint8_t> data) {
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
  const auto tokenizer = Tokenizer::parse_model(bytes, "fuzz.model");
  expect_tokens(tokenizer, bytes);
  expect_tokens(tokenizer, " ab  \u2581<s> a\n");
}

// A chat template, a zero byte, and JSON for its variable `messages`. Small limits end loops soon.
inline void read_chat_template(std::span<const uint8_t> data) {
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
  const size_t end = std::min(bytes.find('\0'), bytes.size());
  const auto chat = jinja::Template::parse(
      bytes.substr(0, end), "fuzz.jinja",
      {.steps = 20'000, .text_bytes = 10'000'000, .output_bytes = 1'000'000});
  jinja::Dict variables;
  variables.set("add_generation_prompt", true);
  variables.set("bos_token", "<s>");
  if (end < bytes.size())
    variables.set("messages", jinja::read_json(bytes.substr(end + 1), "fuzz.json"));
  const std::string text = chat.render(variables);
  require(replace_broken_utf8(text) == text);
}

// Tokens of one byte each, and some of several.
inline const std::shared_ptr<const grammar::TokenTrie>& small_tokens() {
  static const auto tokens = [] {
    std::vector<std::string> bytes;
    for (int byte = 0; byte < 256; ++byte) bytes.emplace_back(1, static_cast<char>(byte));
    for (const char* text : {"{\"", "\": ", "\",", "\"}", "},", "]}", "[[", "{}", "[]", "12", "e5"})
      bytes.emplace_back(text);
    return std::make_shared<const grammar::TokenTrie>(bytes);
  }();
  return tokens;
}

// A JSON schema, a zero byte, and bytes that choose tokens. The mask has exactly the tokens that
// the parse takes, and a text that is complete is JSON.
inline void read_json_schema(std::span<const uint8_t> data) {
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
  const size_t end = std::min(bytes.find('\0'), bytes.size());
  const auto compiled =
      std::make_shared<const grammar::Grammar>(bytes.substr(0, end), small_tokens());
  grammar::GrammarState state(compiled);
  std::string text;
  const std::string_view choices = bytes.substr(std::min(end + 1, bytes.size()));
  for (size_t i = 0; i < std::min<size_t>(choices.size(), 64) && state.may_continue(); ++i) {
    grammar::TokenMask mask;
    state.mask(small_tokens()->vocabulary(), mask);
    int chosen = static_cast<uint8_t>(choices[i]);
    for (int byte = 0; byte < 256; ++byte) {
      grammar::GrammarState next = state;
      require(next.accept(std::string(1, static_cast<char>(byte))) == grammar::has(mask, byte));
    }
    for (int tries = 0; tries < 256 && !grammar::has(mask, chosen); ++tries)
      chosen = (chosen + 1) % 256;
    if (!grammar::has(mask, chosen)) return;  // nothing fits, such as an empty enum
    text += static_cast<char>(chosen);
    require(state.accept(text.substr(text.size() - 1)));
    if (state.is_complete()) require(nlohmann::json::accept(text));
  }
}

inline ToolCallParser::Output parse_calls(ToolCallFormat format, std::string_view text,
                                          size_t piece) {
  ToolCallParser parser(format, R"([{"function": {"name": "f", "parameters": {
      "properties": {"a": {"type": "string"}, "b": {"type": ["null", "string"]}}}}}])");
  ToolCallParser::Output all;
  const auto add = [&](ToolCallParser::Output output) {
    all.content += output.content;
    for (ToolCall& call : output.calls) all.calls.push_back(std::move(call));
  };
  for (size_t at = 0; at < text.size(); at += piece) add(parser.push(text.substr(at, piece)));
  add(parser.finish());
  return all;
}

// A byte for the format, a byte for the size of pieces, and a text. The pieces change nothing, and
// arguments are JSON objects.
inline void read_tool_calls(std::span<const uint8_t> data) {
  if (data.size() < 2) return;
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
  const auto format = static_cast<ToolCallFormat>(data[0] % 7);
  const auto whole = parse_calls(format, bytes.substr(2), bytes.size());
  const auto pieces = parse_calls(format, bytes.substr(2), data[1] % 16 + 1);
  require(whole.content == pieces.content && whole.calls.size() == pieces.calls.size());
  for (size_t i = 0; i < whole.calls.size(); ++i) {
    require(whole.calls[i].name == pieces.calls[i].name);
    require(whole.calls[i].arguments == pieces.calls[i].arguments);
    require(nlohmann::json::parse(whole.calls[i].arguments).is_object());
  }
}

}  // namespace fovea::fuzz
