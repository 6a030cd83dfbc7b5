// SPDX-License-Identifier: Apache-2.0
// Decides which tokens of which requests the next pass computes.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/cache_set.h"
#include "engine/request.h"
#include "engine/shared_prefixes.h"
#include "fovea/error.h"

namespace fovea {

struct SchedulerLimits {
  int32_t max_running = 1;
  int32_t max_batch_tokens = 1;
  int32_t max_prompt_rows = 1;  // max prompt tokens scored in one pass; each needs a row of logits
  bool group_prefixes = false;  // backends read prefixes shared by neighbouring requests once
  int32_t max_drafts = 0;       // max drafts of a request in one pass; each needs a row of logits
  // Max tokens of a pass with decodes and prompts together, before drafts are added.
  int32_t max_mixed_tokens = std::numeric_limits<int32_t>::max();

  // Returns the max number of rows of logits of one pass.
  size_t logit_rows() const {
    return static_cast<size_t>(max_running) * (1 + static_cast<size_t>(max_drafts)) +
           static_cast<size_t>(max_prompt_rows);
  }
};

// Prompts get at least so many tokens of a pass, whatever its number of decodes, if
// max_batch_tokens allows it. So they are not starved.
inline constexpr int32_t kMinPromptTokens = 16;

// The tokens [begin, end) of one request, and drafts after them.
struct Chunk {
  Request* request = nullptr;
  int32_t begin = 0, end = 0;
  int32_t drafts = 0;
};

// One request can never be computed; other requests are unaffected.
class RequestError : public Error {
 public:
  RequestError(int64_t request, ErrorCode code, const std::string& message)
      : Error(code, message), request_(request) {}
  int64_t request() const { return request_; }

 private:
  int64_t request_;
};

// Continuous batching. Requests are served in the order of their ids: an older one never waits for
// a younger one. When the pools are full and no cached prefix can be evicted, the youngest request
// returns its memory and is computed again later. So the oldest always makes progress.
class Scheduler {
 public:
  // `caches` must outlive the scheduler and have room for one request of its longest context.
  Scheduler(CacheSet& caches, SchedulerLimits limits);

  void add(std::unique_ptr<Request> request);  // ids must ascend

  // Returns the next pass: first one token of every running request that is past its prompt
  // (ordered by age, or with group_prefixes such that requests with equal first pages are
  // neighbours), then chunks of prompts, then new requests, all within the limits. With decodes in
  // the pass, prompts get what these leave of max_mixed_tokens, or kMinPromptTokens. Cache slots
  // are ready. A request whose last token is being drawn is left out. The result is valid
  // until the next call of any member. Throws RequestError{out_of_memory} if a request that runs
  // alone finds no memory; the caller must remove it before the next call.
  std::span<const Chunk> schedule();

  // Gives the chunk with this index up to `wanted` drafts, which must fit the context, as far as
  // the limit of tokens and free memory allow: it preempts no request. Returns their number. Call
  // it after schedule().
  int32_t add_drafts(size_t chunk, int32_t wanted);

  // Removes a request and releases its memory. Returns null for an unknown id.
  std::unique_ptr<Request> remove(int64_t id);
  Request* find(int64_t id);

  // Releases the memory of the youngest running request, which will be computed again. Returns
  // false if no request is running.
  bool preempt_youngest();

  bool idle() const { return waiting_.empty() && running_.empty(); }
  // Returns true if a request waits that the number of running requests does not keep out.
  bool may_admit() const {
    return !waiting_.empty() && running_.size() < static_cast<size_t>(limits_.max_running);
  }
  int64_t preemptions() const { return preemptions_; }
  // Number of tokens of admitted requests, and how many of them came from the prefix cache.
  int64_t prefix_queries() const { return prefix_queries_; }
  int64_t prefix_hits() const { return prefix_hits_; }

 private:
  void schedule_running(bool decodes);
  void admit_waiting();
  bool admit(Request& request);
  bool make_room(Request& request, const Chunk& chunk);
  Chunk next_chunk(Request& request) const;
  void accept(const Chunk& chunk);
  int32_t withheld_from_prompts() const;
  void group_by_prefix();  // sorts the chunks of decodes

  CacheSet& caches_;
  SchedulerLimits limits_;
  std::deque<std::unique_ptr<Request>> waiting_;   // ids ascend and exceed all ids of running_
  std::vector<std::unique_ptr<Request>> running_;  // ids ascend
  std::vector<Chunk> chunks_;
  std::vector<std::pair<PageLandmarks, Chunk>> decodes_;  // scratch
  int32_t tokens_left_ = 0;
  int32_t prompt_rows_left_ = 0;
  int64_t preemptions_ = 0, prefix_queries_ = 0, prefix_hits_ = 0;
};

}  // namespace fovea
