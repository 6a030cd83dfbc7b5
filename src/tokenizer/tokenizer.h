// SPDX-License-Identifier: Apache-2.0
// Reads tokenizer.json of Hugging Face tokenizers: byte-level BPE with its pre-tokenizer patterns.
// Anything in the file that would change ids and is not implemented is refused by name.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

class Tokenizer {
 public:
  // Error{io} and {corrupt_file} name the file and the field, Error{unsupported} what is refused.
  static Tokenizer open(const std::string& path);
  static Tokenizer parse(std::string_view json, std::string_view name);
  // The tokenizer of a model without one: no id has text, and encode() throws Error{unsupported}.
  static Tokenizer none();
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Ids of the text, up to 64 MiB of it, with what the file's post-processor puts around it (a
  // begin-of-text token). Added tokens ("<|eos|>") in the text are recognised. Any bytes are
  // accepted: what is not UTF-8 is first replaced by U+FFFD. Safe to call from several threads.
  std::vector<int32_t> encode(std::string_view text) const;
  // As encode(), without what the post-processor puts around it.
  std::vector<int32_t> encode_bare(std::string_view text) const;
  // Text of the ids; special tokens and unknown ids are left out, broken UTF-8 becomes U+FFFD.
  std::string decode(std::span<const int32_t> tokens) const;
  // The raw bytes of one token, empty for special tokens and unknown ids.
  std::string_view token_bytes(int32_t token) const;
  int32_t size() const;  // largest id + 1

 private:
  struct Data;
  explicit Tokenizer(std::unique_ptr<Data> data);
  std::unique_ptr<Data> data_;
};

// Bytes to text, token by token: holds back the bytes of a character until it is whole.
class Utf8Stream {
 public:
  std::string push(std::string_view bytes);  // what became certain
  std::string finish();                      // the rest; incomplete characters become U+FFFD

 private:
  std::string pending_;
};

}  // namespace fovea
