// SPDX-License-Identifier: Apache-2.0
// Decoders of tokenizer.json: steps that turn tokens into text, one token at a time.
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
  bool drop_first = true;   // ... except in the first token, which loses it
};
struct StripDecoder {
  std::string content;  // one character
  size_t start = 0;     // max number to remove at the beginning
  size_t stop = 0;      // max number to remove at the end
};
struct ByteFallbackDecoder {};  // "<0xE2>", "<0x82>", "<0xAC>" become one character
struct ByteLevelDecoder {};     // letters become bytes
struct FuseDecoder {};          // makes the following steps see one token
struct JoinDecoder {};          // used without a decoder: puts spaces between tokens

using DecoderStep = std::variant<ReplaceDecoder, MetaspaceDecoder, StripDecoder,
                                 ByteFallbackDecoder, ByteLevelDecoder, FuseDecoder, JoinDecoder>;

class Decoder {
 public:
  // Adds a step. Returns nullopt, or the reason why it cannot follow the previous steps.
  std::optional<std::string> add(DecoderStep step);
  // Returns the bytes of a token in the middle of a text, where Strip removes nothing.
  std::string token_bytes(std::string_view token) const;
  size_t steps() const { return steps_.size(); }

 private:
  friend class DecoderStream;
  std::vector<DecoderStep> steps_;
  std::vector<bool> fused_;  // per step: true if it sees one token in pieces
  bool ends_fused_ = false;
};

// Decodes a sequence of tokens. Withholds text until later tokens cannot change it, so the
// concatenated results do not depend on how the sequence is fed in.
class DecoderStream {
 public:
  // `decoder` must outlive the stream.
  explicit DecoderStream(const Decoder& decoder)
      : decoder_(&decoder), states_(decoder.steps_.size()) {}

  std::string push(std::string_view token);  // returns text that is final
  std::string finish();                      // returns the rest

 private:
  struct State {
    Utf8Stream characters;  // output of ByteLevel
    std::string held;
    size_t cut = 0;        // characters that Strip has removed at the beginning
    bool started = false;  // true after a token, or a character that is not removed
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
