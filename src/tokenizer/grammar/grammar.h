// SPDX-License-Identifier: Apache-2.0
// Restricts generated tokens to texts that a JSON schema allows.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/grammar/automaton.h"
#include "tokenizer/grammar/token_trie.h"

namespace fovea::grammar {

// The place to which a called rule returns. A chain of them is the stack of a parse.
struct Frame {
  int32_t node = kNone;
  std::shared_ptr<const Frame> outer = {};
  int depth = 1;
};
using Stack = std::shared_ptr<const Frame>;

// A set of tokens, a bit for each.
using TokenMask = std::vector<uint64_t>;
inline bool has(const TokenMask& mask, int32_t token) {
  return mask[static_cast<size_t>(token) / 64] >> (token % 64) & 1;
}
inline void allow(int32_t token, TokenMask& mask) {
  mask[static_cast<size_t>(token) / 64] |= uint64_t{1} << (token % 64);
}

// A compiled schema. Thread-safe. Keeps the masks that it has computed: with the stack unknown, a
// node of the automaton allows some tokens, and others return from its rule and depend on the
// stack.
class Grammar {
 public:
  static constexpr int kMaxDepth = 128;  // levels of called rules for bounded calls
  static constexpr size_t kMaxCachedBytes = 64'000'000;

  // Throws Error{invalid_argument} with the place in the schema and the keyword.
  Grammar(std::string_view schema, std::shared_ptr<const TokenTrie> tokens);
  ~Grammar();

  // A place of a parse: a node that reads next, within calls.
  struct Thread {
    int32_t node = 0;
    Stack stack = {};
  };
  std::vector<Thread> start() const { return {{first_, nullptr}}; }
  // Reads a byte in all threads. Returns none if no text of the grammar continues so.
  std::vector<Thread> step(std::span<const Thread> threads, uint8_t byte) const;
  // Returns true if the text may end here.
  bool may_end(std::span<const Thread> threads) const;
  // Returns true if the text may continue.
  bool may_continue(std::span<const Thread> threads) const;
  // Adds the tokens that may follow to a mask of TokenTrie::vocabulary() bits.
  void add_allowed(std::span<const Thread> threads, TokenMask& mask) const;

 private:
  class Cache;

  // Calls found(node, stack) for each node with edges that can be reached without a byte; returns
  // true if the end can be.
  template <typename Found>
  bool reach(const Thread& thread, const Found& found) const;

  Automaton automaton_;
  int32_t first_ = kNone;
  std::shared_ptr<const TokenTrie> tokens_;
  mutable std::mutex mutex_;
  std::unique_ptr<Cache> cache_;
};

// The parse of one text.
class GrammarState {
 public:
  explicit GrammarState(std::shared_ptr<const Grammar> grammar)
      : grammar_(std::move(grammar)), threads_(grammar_->start()) {}

  // Sets `mask` to the tokens that may follow.
  void mask(size_t vocabulary, TokenMask& mask) const {
    mask.assign((vocabulary + 63) / 64, 0);
    grammar_->add_allowed(threads_, mask);
  }
  // Reads the bytes of a token. Returns false, and changes nothing, if they are not allowed.
  bool accept(std::string_view bytes);
  // Returns true if the text may end here; nothing more may follow if may_continue() is false.
  bool is_complete() const { return grammar_->may_end(threads_); }
  bool may_continue() const { return grammar_->may_continue(threads_); }

 private:
  std::shared_ptr<const Grammar> grammar_;
  std::vector<Grammar::Thread> threads_;
};

}  // namespace fovea::grammar
