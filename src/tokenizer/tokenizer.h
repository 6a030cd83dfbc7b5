// SPDX-License-Identifier: Apache-2.0
// Converts text to token ids and back. Equals the `tokenizers` package on a tokenizer.json of
// Hugging Face, for BPE and unigram models with their normalizers, pre-tokenizers, post-processors
// and decoders. Also reads a tokenizer.model of sentencepiece. Refuses, by name, everything in a
// file that would change ids and is not implemented.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

class TokenStream;

class Tokenizer {
 public:
  // Loads the tokenizer of a checkpoint from tokenizer.json, or else from tokenizer.model, and adds
  // the settings of tokenizer_config.json. Throws Error{io} and {corrupt_file} naming the file and
  // the field, and Error{unsupported} naming what is refused.
  static Tokenizer load(const std::string& folder);
  // Opens a tokenizer.json, or a tokenizer.model if the name ends in ".model".
  static Tokenizer open(const std::string& path);
  // Parses a tokenizer.json. `settings` is a tokenizer_config.json or null.
  static Tokenizer parse(std::string_view json, std::string_view name,
                         std::string_view settings = {});
  // Parses a tokenizer.model.
  static Tokenizer parse_model(std::string_view bytes, std::string_view name);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Returns the ids of a text of up to 64 MiB, including those that the file's post-processor adds
  // (a begin-of-text token). Recognises added tokens ("<|eos|>") in the text. Accepts any bytes:
  // invalid UTF-8 becomes U+FFFD first. Thread-safe.
  std::vector<int32_t> encode(std::string_view text) const;
  // Works as encode() without the post-processor.
  std::vector<int32_t> encode_bare(std::string_view text) const;
  // Returns the UTF-8 text of the ids. Omits special tokens and unknown ids.
  std::string decode(std::span<const int32_t> tokens) const;
  // Decodes token by token. The tokenizer must outlive the stream.
  TokenStream stream() const;
  // Returns the text of a special token, or an empty one for other ids.
  std::string_view special_text(int32_t token) const;
  // Returns the bytes that a token stands for, which need not be whole characters; of a special
  // token its text. Unknown ids have none.
  std::string token_bytes(int32_t token) const;
  int32_t size() const;  // largest id + 1

 private:
  friend class TokenStream;
  struct Data;
  explicit Tokenizer(std::unique_ptr<Data> data);
  std::unique_ptr<Data> data_;
};

// Decodes ids one at a time. Withholds text that later ids could change, such as an incomplete
// character. The concatenated results equal decode() of all ids.
class TokenStream {
 public:
  TokenStream(TokenStream&&) noexcept;
  TokenStream& operator=(TokenStream&&) noexcept;
  ~TokenStream();

  std::string push(int32_t token);  // returns text that is final
  std::string finish();             // returns the rest

 private:
  friend class Tokenizer;
  struct Data;
  explicit TokenStream(std::unique_ptr<Data> data);
  std::unique_ptr<Data> data_;
};

}  // namespace fovea
