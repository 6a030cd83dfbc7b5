// SPDX-License-Identifier: Apache-2.0
// Text to token ids and back, as the `tokenizers` package does it with a tokenizer.json of Hugging
// Face: BPE and unigram models with their normalizers, pre-tokenizers, post-processors and
// decoders. Reads a tokenizer.model of sentencepiece too. Anything in a file that would change ids
// and is not implemented is refused by name.
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
  // The tokenizer of a checkpoint: tokenizer.json, or tokenizer.model where there is none, with
  // what tokenizer_config.json adds. Error{io} and {corrupt_file} name the file and the field,
  // Error{unsupported} what is refused.
  static Tokenizer load(const std::string& folder);
  // A tokenizer.json, or by its name (".model") a tokenizer.model.
  static Tokenizer open(const std::string& path);
  // A tokenizer.json. `settings`, if any, is a tokenizer_config.json.
  static Tokenizer parse(std::string_view json, std::string_view name,
                         std::string_view settings = {});
  // A tokenizer.model.
  static Tokenizer parse_model(std::string_view bytes, std::string_view name);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Ids of the text, up to 64 MiB of it, with what the file's post-processor puts around it (a
  // begin-of-text token). Added tokens ("<|eos|>") in the text are recognised. Any bytes are
  // accepted: what is not UTF-8 is first replaced by U+FFFD. Safe to call from several threads.
  std::vector<int32_t> encode(std::string_view text) const;
  // As encode(), without what the post-processor puts around it.
  std::vector<int32_t> encode_bare(std::string_view text) const;
  // Text of the ids, in UTF-8; special tokens and unknown ids are left out.
  std::string decode(std::span<const int32_t> tokens) const;
  // The same token by token. The tokenizer must outlive the stream.
  TokenStream stream() const;
  // The text of a special token as it is written, empty for other ids.
  std::string_view special_text(int32_t token) const;
  int32_t size() const;  // largest id + 1

 private:
  friend class TokenStream;
  struct Data;
  explicit Tokenizer(std::unique_ptr<Data> data);
  std::unique_ptr<Data> data_;
};

// Ids to text, one by one: holds back what later ids could still change, such as the bytes of a
// character that is not whole. The pieces joined are what decode() gives for all ids.
class TokenStream {
 public:
  TokenStream(TokenStream&&) noexcept;
  TokenStream& operator=(TokenStream&&) noexcept;
  ~TokenStream();

  std::string push(int32_t token);  // what became certain
  std::string finish();             // the rest

 private:
  friend class Tokenizer;
  struct Data;
  explicit TokenStream(std::unique_ptr<Data> data);
  std::unique_ptr<Data> data_;
};

}  // namespace fovea
