// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tokenizer.h"

#include <filesystem>
#include <utility>

#include "core/check.h"
#include "core/mapped_file.h"
#include "tokenizer/tokenizer_files.h"
#include "tokenizer/tokenizer_parts.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

// Merging one word takes up to 28 bytes of memory per byte.
constexpr size_t kMaxTextBytes = 64 << 20;

// Encodes one text.
class Encoder {
 public:
  Encoder(const TokenizerParts& parts, std::vector<int32_t>& tokens)
      : parts_(parts), tokens_(tokens) {}

  void encode_text(std::string_view text) {
    for (const TextPart& part : parts_.raw_added.split(text)) {
      if (part.token >= 0) {
        tokens_.push_back(part.token);
      } else {
        encode_normalized(parts_.normalizer.apply(text.substr(part.begin, part.end - part.begin),
                                                  part.begin == 0));
      }
    }
  }

 private:
  void encode_normalized(const NormalizedText& text) {
    for (const TextPart& part : parts_.normalized_added.split(text.text)) {
      if (part.token >= 0) {
        tokens_.push_back(part.token);
      } else {
        encode_part({text.text.substr(part.begin, part.end - part.begin),
                     text.at_start && part.begin == 0});
      }
    }
  }

  void encode_part(const NormalizedText& text) {
    parts_.pre_tokenizer.split(text, [&](std::string_view word) {
      std::visit([&](const auto& model) { model.encode(word, tokens_); }, parts_.model);
    });
  }

  const TokenizerParts& parts_;
  std::vector<int32_t>& tokens_;
};

TokenizerSettings settings_of(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / "tokenizer_config.json";
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return {};
  const MappedFile file(path.string());
  return read_tokenizer_settings(file.text(), path.string());
}

TokenizerParts open_parts(const std::string& path, const TokenizerSettings& settings) {
  const MappedFile file(path);
  return path.ends_with(".model") ? read_sentencepiece(file.text(), path, settings)
                                  : read_tokenizer_json(file.text(), path, settings);
}

}  // namespace

struct Tokenizer::Data {
  TokenizerParts parts;
};

Tokenizer::Tokenizer(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::string& folder) {
  const std::filesystem::path path = folder;
  std::error_code error;
  const bool has_json = std::filesystem::exists(path / "tokenizer.json", error);
  const bool has_model = std::filesystem::exists(path / "tokenizer.model", error);
  const char* name = !has_json && has_model ? "tokenizer.model" : "tokenizer.json";
  return Tokenizer(
      std::make_unique<Data>(Data{open_parts((path / name).string(), settings_of(path))}));
}

Tokenizer Tokenizer::open(const std::string& path) {
  return Tokenizer(std::make_unique<Data>(Data{open_parts(path, {})}));
}

Tokenizer Tokenizer::parse(std::string_view json, std::string_view name,
                           std::string_view settings) {
  TokenizerSettings read;
  if (!settings.empty()) read = read_tokenizer_settings(settings, "tokenizer_config.json");
  return Tokenizer(std::make_unique<Data>(Data{read_tokenizer_json(json, name, read)}));
}

Tokenizer Tokenizer::parse_model(std::string_view bytes, std::string_view name) {
  return Tokenizer(std::make_unique<Data>(Data{read_sentencepiece(bytes, name, {})}));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  const std::vector<int32_t> bare = encode_bare(text);
  const TokenizerParts& parts = data_->parts;
  std::vector<int32_t> tokens = parts.prefix;
  tokens.insert(tokens.end(), bare.begin(), bare.end());
  tokens.insert(tokens.end(), parts.suffix.begin(), parts.suffix.end());
  return tokens;
}

std::vector<int32_t> Tokenizer::encode_bare(std::string_view text) const {
  check_argument(text.size() <= kMaxTextBytes, "text has {} bytes, the limit is {}", text.size(),
                 kMaxTextBytes);
  std::vector<int32_t> tokens;
  Encoder(data_->parts, tokens).encode_text(replace_broken_utf8(text));
  return tokens;
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  TokenStream pieces = stream();
  std::string text;
  for (const int32_t token : tokens) text += pieces.push(token);
  return text += pieces.finish();
}

std::string_view Tokenizer::special_text(int32_t token) const {
  const TokenizerParts& parts = data_->parts;
  return parts.is_special(token) ? parts.text(token) : std::string_view();
}

std::string Tokenizer::token_bytes(int32_t token) const {
  const TokenizerParts& parts = data_->parts;
  if (!parts.has(token)) return {};
  const std::string_view text = parts.text(token);
  return parts.is_special(token) ? std::string(text) : parts.decoder.token_bytes(text);
}

int32_t Tokenizer::size() const { return data_->parts.size(); }

struct TokenStream::Data {
  const TokenizerParts* parts;
  DecoderStream decoder;
};

TokenStream::TokenStream(std::unique_ptr<Data> data) : data_(std::move(data)) {}
TokenStream::TokenStream(TokenStream&&) noexcept = default;
TokenStream& TokenStream::operator=(TokenStream&&) noexcept = default;
TokenStream::~TokenStream() = default;

TokenStream Tokenizer::stream() const {
  const TokenizerParts& parts = data_->parts;
  return TokenStream(
      std::make_unique<TokenStream::Data>(TokenStream::Data{&parts, DecoderStream(parts.decoder)}));
}

std::string TokenStream::push(int32_t token) {
  const TokenizerParts& parts = *data_->parts;
  if (!parts.has(token) || parts.is_special(token)) return {};
  return data_->decoder.push(parts.text(token));
}

std::string TokenStream::finish() { return data_->decoder.finish(); }

}  // namespace fovea
