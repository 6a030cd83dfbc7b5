// SPDX-License-Identifier: Apache-2.0
// Decoders of tokenizer.json: steps that turn the texts of tokens into text, token by token.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tokenizer/pattern.h"
#include "tokenizer/utf8.h"

namespace fovea {

struct ReplaceDecoder {
  Pattern pattern;
  std::string content;
};
struct MetaspaceDecoder {
  std::string replacement;  // becomes a space
  bool drop_first = true;   // ... and nothing in the first token
};
struct StripDecoder {
  std::string content;  // a character
  size_t start = 0;     // as many are cut at the beginning, at most
  size_t stop = 0;      // ... at the end
};
struct ByteFallbackDecoder {};  // "<0xE2>", "<0x82>", "<0xAC>" become one character
struct ByteLevelDecoder {};     // letters become bytes
struct FuseDecoder {};          // what follows sees one token
struct JoinDecoder {};          // without a decoder: tokens with spaces between them

using DecoderStep = std::variant<ReplaceDecoder, MetaspaceDecoder, StripDecoder,
                                 ByteFallbackDecoder, ByteLevelDecoder, FuseDecoder, JoinDecoder>;

class Decoder {
 public:
  // nullopt when the step was added, else why it cannot follow those before it.
  std::optional<std::string> add(DecoderStep step);
  size_t steps() const { return steps_.size(); }

 private:
  friend class DecoderStream;
  std::vector<DecoderStep> steps_;
  std::vector<bool> fused_;  // by step: it sees one token, piece by piece
  bool ends_fused_ = false;
};

// The text of a sequence of tokens. What the calls return is, joined, the same however many tokens
// a text has: it is held back until later tokens cannot change it.
class DecoderStream {
 public:
  // `decoder` must outlive this.
  explicit DecoderStream(const Decoder& decoder)
      : decoder_(&decoder), states_(decoder.steps_.size()) {}

  std::string push(std::string_view token);  // what became certain
  std::string finish();                      // the rest

 private:
  struct State {
    Utf8Stream characters;  // of ByteLevel
    std::string held;
    size_t cut = 0;        // characters at the beginning of the text, by Strip
    bool started = false;  // a token, or a character that stays, was seen
  };

  void pass(size_t index, std::string token, std::string& out);
  void flush(size_t index, std::string& out);
  void flush_bytes(size_t index, std::string& out);
  std::string strip_piece(const StripDecoder& step, State& state, std::string_view piece) const;
  std::string replace_piece(const ReplaceDecoder& step, State& state, std::string_view piece) const;

  const Decoder* decoder_;
  std::vector<State> states_;
};

}  // namespace fovea
