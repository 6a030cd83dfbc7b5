// SPDX-License-Identifier: Apache-2.0
// Options and requests as bytes, which rank 0 sends to ranks in other processes. All run the same
// version on processors with one order of bytes.
#pragma once

#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "fovea/engine.h"

namespace fovea {

// Appends values to bytes.
class MessageWriter {
 public:
  template <typename T>
  void operator()(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* const from = reinterpret_cast<const char*>(&value);
    bytes_.insert(bytes_.end(), from, from + sizeof(T));
  }
  void operator()(const std::string& text) {
    (*this)(text.size());
    bytes_.insert(bytes_.end(), text.begin(), text.end());
  }
  template <typename T>
  void operator()(const std::vector<T>& values) {
    (*this)(values.size());
    for (const T& value : values) (*this)(value);
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

// Takes them in the same order.
class MessageReader {
 public:
  explicit MessageReader(std::span<const char> bytes) : rest_(bytes) {}

  template <typename T>
  void operator()(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
  }
  void operator()(std::string& text) {
    size_t bytes = 0;
    (*this)(bytes);
    const std::span<const char> from = take(bytes);
    text.assign(from.begin(), from.end());
  }
  template <typename T>
  void operator()(std::vector<T>& values) {
    size_t count = 0;
    (*this)(count);
    values.clear();
    for (size_t i = 0; i < count; ++i) (*this)(values.emplace_back());
  }

 private:
  std::span<const char> take(size_t bytes) {
    if (bytes > rest_.size()) fail(ErrorCode::device_failure, "a message of rank 0 is too short");
    const std::span<const char> taken = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return taken;
  }

  std::span<const char> rest_;
};

// A field more or less than these bindings have does not compile, so that none is forgotten.
template <typename Message, typename Wish>
void transfer_wish(Message& message, Wish& wish) {
  auto& [policy, name] = wish;
  message(policy);
  message(name);
}

// The registry stays behind: the others use the built-in one.
template <typename Message, typename Options>
void transfer_options(Message& message, Options& options) {
  auto& [model_path, random_weights, device, registry, backend, decode_backend, kv_dtype, kv_scale,
         page_size, kv_memory_bytes, max_requests, max_batch_tokens, max_mixed_tokens, max_context,
         threads, prefix_cache, batch_invariant, cuda_graphs, max_graph_requests, overlap,
         speculate, max_drafts, draft_branches, always_speculate, record_steps, prefix_levels,
         min_prefix_savings, workspace_budget] = options;
  (void)registry;
  const auto all = [&](auto&... values) { (message(values), ...); };
  all(model_path, random_weights, device, kv_dtype, kv_scale, page_size, kv_memory_bytes,
      max_requests, max_batch_tokens, max_mixed_tokens, max_context, threads, prefix_cache,
      batch_invariant, cuda_graphs, max_graph_requests, overlap, speculate, max_drafts,
      draft_branches, always_speculate, record_steps, prefix_levels, min_prefix_savings,
      workspace_budget);
  transfer_wish(message, backend);
  bool decodes_apart = decode_backend.has_value();
  message(decodes_apart);
  if constexpr (!std::is_const_v<Options>) {
    if (decodes_apart) decode_backend.emplace();
  }
  if (decodes_apart) transfer_wish(message, *decode_backend);
}

template <typename Message, typename Request>
void transfer_request(Message& message, Request& request) {
  auto& [prompt, tokens, sampling, salt] = request;
  auto& [max_new_tokens, temperature, top_k, top_p, min_p, seed, logit_bias, repetition_penalty,
         frequency_penalty, presence_penalty, min_tokens, stop, stop_tokens, ignore_eos,
         json_schema, logprobs, prompt_logprobs] = sampling;
  const auto all = [&](auto&... values) { (message(values), ...); };
  all(prompt, tokens, salt, max_new_tokens, temperature, top_k, top_p, min_p, seed, logit_bias,
      repetition_penalty, frequency_penalty, presence_penalty, min_tokens, stop, stop_tokens,
      ignore_eos, json_schema, logprobs, prompt_logprobs);
}

}  // namespace fovea
