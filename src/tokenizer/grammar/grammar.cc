// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/grammar/grammar.h"

#include <algorithm>
#include <array>
#include <map>

#include "core/check.h"
#include "tokenizer/grammar/json_schema.h"

namespace fovea::grammar {
namespace {

bool same_stack(const Stack& left, const Stack& right) {
  const Frame *a = left.get(), *b = right.get();
  for (; a != b; a = a->outer.get(), b = b->outer.get())
    if (a == nullptr || b == nullptr || a->node != b->node) return false;
  return true;
}

}  // namespace

// Deterministic states above an unknown stack, and the masks of nodes. Grammar::mutex_ guards it.
class Grammar::Cache {
 public:
  explicit Cache(const Grammar& grammar) : grammar_(grammar) {}

  void add_allowed(int32_t node, const Stack& stack, TokenMask& mask) {
    if (bytes_ > kMaxCachedBytes) clear();
    way_.clear();
    if (stack != nullptr && stack->depth > kMaxDepth - kMaxDepthOfToken) {
      // Near the limit the tokens depend on the whole stack.
      walk(0, state_of({{node, stack}}), [&](uint32_t place, int32_t) { allow_at(place, mask); });
      return;
    }
    const Masked& masked = masked_of(node, mask.size());
    for (size_t i = 0; i < mask.size(); ++i) mask[i] |= masked.allowed[i];
    if (stack == nullptr) return;
    for (const uint32_t place : masked.returns) add_after_return(place, *stack, mask);
  }

 private:
  // Threads above the stack, which the rule of the first one returns to if `returns`.
  struct State {
    std::vector<Thread> threads;
    bool returns = false;
    std::array<int32_t, 256> next = {};  // states; kUnknown
  };
  struct Masked {
    TokenMask allowed;
    std::vector<uint32_t> returns;  // places in the trie where the rule has ended
  };
  static constexpr int32_t kUnknown = -2;
  static constexpr int kMaxDepthOfToken = 32;  // calls that one token may add

  void clear() {
    states_.clear();
    starts_.clear();
    by_threads_.clear();
    masked_.clear();
    bytes_ = 0;
  }

  // Returns the state of threads that have read a byte.
  int32_t state_of(const std::vector<Thread>& threads) {
    std::vector<int32_t> key;
    for (const Thread& thread : threads) {
      key.push_back(-1);
      key.push_back(thread.node);
      for (const Frame* frame = thread.stack.get(); frame != nullptr; frame = frame->outer.get())
        key.push_back(frame->node);
    }
    const auto known = by_threads_.find(key);
    if (known != by_threads_.end()) return known->second;
    State state{threads};
    state.next.fill(kUnknown);
    state.returns = grammar_.may_end(threads);
    // Comes before its key: if memory ends in between, no key names a state that does not exist.
    const auto added = static_cast<int32_t>(states_.size());
    states_.push_back(std::move(state));
    bytes_ += sizeof(State) + key.size() * 8;
    by_threads_.emplace(std::move(key), added);
    return added;
  }

  int32_t start_of(int32_t node) {
    const auto found = starts_.find(node);
    if (found != starts_.end()) return found->second;
    const int32_t state = state_of({{node, nullptr}});
    starts_.emplace(node, state);
    return state;
  }

  int32_t next_of(int32_t state, uint8_t byte) {
    const int32_t known = states_[static_cast<size_t>(state)].next[byte];
    if (known != kUnknown) return known;
    const std::vector<Thread> threads =
        grammar_.step(states_[static_cast<size_t>(state)].threads, byte);
    const int32_t next = threads.empty() ? kNone : state_of(threads);
    states_[static_cast<size_t>(state)].next[byte] = next;
    return next;
  }

  // Walks the subtree of a place of the trie. Calls at(place, state) for each node that the state
  // at `place` reaches.
  template <typename At>
  void walk(uint32_t place, int32_t state, const At& at) {
    const std::span<const TokenTrie::Node> nodes = grammar_.tokens_->nodes();
    const size_t base = nodes[place].depth, first = way_.size();
    way_.push_back(state);
    for (uint32_t i = place + 1; i < nodes[place].end;) {
      const TokenTrie::Node& node = nodes[i];
      way_.resize(first + node.depth - base);
      const int32_t next = next_of(way_.back(), node.byte);
      if (next == kNone) {
        i = node.end;
        continue;
      }
      way_.push_back(next);
      at(i, next);
      ++i;
    }
    way_.resize(first);
  }

  void allow_at(uint32_t place, TokenMask& mask) const {
    for (const int32_t token : grammar_.tokens_->tokens(grammar_.tokens_->nodes()[place]))
      allow(token, mask);
  }

  const Masked& masked_of(int32_t node, size_t words) {
    const auto found = masked_.find(node);
    if (found != masked_.end()) return found->second;
    Masked masked{TokenMask(words), {}};
    const int32_t start = start_of(node);
    if (states_[static_cast<size_t>(start)].returns) masked.returns.push_back(0);
    walk(0, start, [&](uint32_t place, int32_t state) {
      allow_at(place, masked.allowed);
      if (states_[static_cast<size_t>(state)].returns) masked.returns.push_back(place);
    });
    bytes_ += words * 8 + masked.returns.size() * 4 + 100;
    return masked_.emplace(node, std::move(masked)).first->second;
  }

  // Adds tokens that continue in the frame after the rule above it has ended.
  void add_after_return(uint32_t place, const Frame& frame, TokenMask& mask) {
    const int32_t start = start_of(frame.node);
    if (states_[static_cast<size_t>(start)].returns && frame.outer)
      add_after_return(place, *frame.outer, mask);
    if (grammar_.tokens_->nodes()[place].end == place + 1) return;
    walk(place, start, [&](uint32_t inside, int32_t state) {
      allow_at(inside, mask);
      if (states_[static_cast<size_t>(state)].returns && frame.outer)
        add_after_return(inside, *frame.outer, mask);
    });
  }

  const Grammar& grammar_;
  std::vector<State> states_;
  std::unordered_map<int32_t, int32_t> starts_;  // states by node
  std::map<std::vector<int32_t>, int32_t> by_threads_;
  std::unordered_map<int32_t, Masked> masked_;
  std::vector<int32_t> way_;  // states from the roots of the running walks to their places
  size_t bytes_ = 0;
};

Grammar::Grammar(std::string_view schema, std::shared_ptr<const TokenTrie> tokens)
    : first_(SchemaCompiler::compile(schema, automaton_)),
      tokens_(std::move(tokens)),
      cache_(std::make_unique<Cache>(*this)) {
  check_argument(may_continue(start()), "json_schema: it allows no value");
}

Grammar::~Grammar() = default;

template <typename Found>
bool Grammar::reach(const Thread& thread, const Found& found) const {
  bool ends = false;
  std::vector<Thread> todo = {thread}, done;
  const auto push = [&](int32_t node, const Stack& stack) {
    const auto known = [&](const Thread& other) {
      return other.node == node && same_stack(other.stack, stack);
    };
    if (std::ranges::none_of(done, known)) todo.push_back({node, stack});
  };
  while (!todo.empty()) {
    const Thread now = std::move(todo.back());
    todo.pop_back();
    done.push_back(now);
    const Node& node = automaton_.node(now.node);
    if (!node.edges.empty()) found(node, now.stack);
    for (const int32_t target : node.free) push(target, now.stack);
    const int depth = now.stack ? now.stack->depth : 0;
    if (node.call != kNone && (!node.bounded || depth < kMaxDepth))
      push(node.call, std::make_shared<const Frame>(Frame{node.after, now.stack, depth + 1}));
    if (!node.ends) continue;
    if (now.stack) {
      push(now.stack->node, now.stack->outer);
    } else {
      ends = true;
    }
  }
  return ends;
}

std::vector<Grammar::Thread> Grammar::step(std::span<const Thread> threads, uint8_t byte) const {
  std::vector<Thread> next;
  for (const Thread& thread : threads) {
    reach(thread, [&](const Node& node, const Stack& stack) {
      for (const Edge& edge : node.edges) {
        if (byte < edge.low || byte > edge.high) continue;
        const auto known = [&](const Thread& other) {
          return other.node == edge.target && same_stack(other.stack, stack);
        };
        if (std::ranges::none_of(next, known)) next.push_back({edge.target, stack});
      }
    });
  }
  return next;
}

bool Grammar::may_end(std::span<const Thread> threads) const {
  return std::ranges::any_of(threads, [&](const Thread& thread) {
    return reach(thread, [](const Node&, const Stack&) {});
  });
}

bool Grammar::may_continue(std::span<const Thread> threads) const {
  bool continues = false;
  for (const Thread& thread : threads)
    reach(thread, [&](const Node&, const Stack&) { continues = true; });
  return continues;
}

void Grammar::add_allowed(std::span<const Thread> threads, TokenMask& mask) const {
  const std::lock_guard lock(mutex_);
  for (const Thread& thread : threads) cache_->add_allowed(thread.node, thread.stack, mask);
}

bool GrammarState::accept(std::string_view bytes) {
  std::vector<Grammar::Thread> threads = threads_;
  for (const char byte : bytes) {
    threads = grammar_->step(threads, static_cast<uint8_t>(byte));
    if (threads.empty()) return false;
  }
  threads_ = std::move(threads);
  return true;
}

}  // namespace fovea::grammar
