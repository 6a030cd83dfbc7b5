// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tokenizer.h"

#include <utility>

#include "core/check.h"
#include "core/mapped_file.h"
#include "tokenizer/nfc.h"
#include "tokenizer/tokenizer_file.h"
#include "tokenizer/unicode.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

constexpr size_t kMaxTextBytes = 64 << 20;  // merging one word needs up to 24 bytes for each

// Encodes the pieces of one text.
class Encoder {
 public:
  Encoder(const TokenizerFile& file, std::vector<int32_t>& tokens) : file_(file), tokens_(tokens) {}

  void encode_text(std::string_view text) {
    for (const TextPart& part : file_.raw_added.split(text)) {
      if (part.token >= 0) {
        tokens_.push_back(part.token);
      } else if (file_.nfc) {
        encode_normalized(to_nfc(part.text));
      } else {
        encode_normalized(part.text);
      }
    }
  }

 private:
  // A text, and the text of the same length that patterns are matched with.
  struct Piece {
    std::string_view text;
    std::string_view pattern_text;

    Piece part(size_t begin, size_t end) const {
      return {text.substr(begin, end - begin), pattern_text.substr(begin, end - begin)};
    }
  };

  void encode_normalized(std::string_view text) {
    for (const TextPart& part : file_.normalized_added.split(text)) {
      if (part.token >= 0) {
        tokens_.push_back(part.token);
      } else if (has_young_characters(part.text)) {
        run_stage(0, {part.text, with_old_characters(part.text)});
      } else {
        run_stage(0, {part.text, part.text});
      }
    }
  }

  void run_stage(size_t index, Piece piece) {
    if (piece.text.empty()) return;
    if (index == file_.stages.size()) return encode_word(piece.text);
    const SplitStage& stage = file_.stages[index];
    std::string prefixed, prefixed_pattern_text;
    if (stage.prefix_space && !piece.text.starts_with(' ')) {
      prefixed.append(" ").append(piece.text);
      prefixed_pattern_text.append(" ").append(piece.pattern_text);
      piece = {prefixed, prefixed_pattern_text};
    }
    if (!stage.pattern) return run_stage(index + 1, piece);
    size_t done = 0;
    while (const auto match = stage.pattern->find(piece.pattern_text, done, scratch_)) {
      if (stage.keep_rests) run_stage(index + 1, piece.part(done, match->begin));
      if (stage.keep_matches) run_stage(index + 1, piece.part(match->begin, match->end));
      done = match->end;
    }
    if (stage.keep_rests) run_stage(index + 1, piece.part(done, piece.text.size()));
  }

  void encode_word(std::string_view word) {
    if (file_.ignore_merges) {
      const auto found = file_.ids.find(word);
      if (found != file_.ids.end()) return tokens_.push_back(found->second);
    }
    file_.merger.encode(word, tokens_);
  }

  const TokenizerFile& file_;
  std::vector<int32_t>& tokens_;
  PatternScratch scratch_;
};

}  // namespace

struct Tokenizer::Data {
  TokenizerFile file;
};

Tokenizer::Tokenizer(std::unique_ptr<Data> data) : data_(std::move(data)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::none() { return Tokenizer(nullptr); }

Tokenizer Tokenizer::open(const std::string& path) {
  const MappedFile file(path);
  return parse(file.text(), path);
}

Tokenizer Tokenizer::parse(std::string_view json, std::string_view name) {
  return Tokenizer(std::make_unique<Data>(Data{read_tokenizer_file(json, name)}));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  const std::vector<int32_t> bare = encode_bare(text);
  const TokenizerFile& file = data_->file;
  std::vector<int32_t> tokens = file.prefix;
  tokens.insert(tokens.end(), bare.begin(), bare.end());
  tokens.insert(tokens.end(), file.suffix.begin(), file.suffix.end());
  return tokens;
}

std::vector<int32_t> Tokenizer::encode_bare(std::string_view text) const {
  if (data_ == nullptr) {
    fail(ErrorCode::unsupported, "the model has no tokenizer.json: give token ids instead of text");
  }
  check_argument(text.size() <= kMaxTextBytes, "text has {} bytes, the limit is {}", text.size(),
                 kMaxTextBytes);
  std::vector<int32_t> tokens;
  Encoder(data_->file, tokens).encode_text(replace_broken_utf8(text));
  return tokens;
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  std::string bytes;
  for (const int32_t token : tokens) bytes += token_bytes(token);
  return replace_broken_utf8(bytes);
}

std::string_view Tokenizer::token_bytes(int32_t token) const {
  if (token < 0 || token >= size() || data_->file.special[token]) return {};
  return data_->file.bytes[token];
}

int32_t Tokenizer::size() const {
  return data_ == nullptr ? 0 : static_cast<int32_t>(data_->file.bytes.size());
}

}  // namespace fovea
