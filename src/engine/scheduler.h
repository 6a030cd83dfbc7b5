// SPDX-License-Identifier: Apache-2.0
// Which tokens of which requests the next pass computes.
#pragma once

#include <cstdint>
#include <deque>
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
  int32_t max_prompt_rows = 1;  // prompt tokens scored in one pass: each needs a row of logits
  bool group_prefixes = false;  // backends read what neighbours share once for all of them
};

// Tokens [begin, end) of one request.
struct Chunk {
  Request* request = nullptr;
  int32_t begin = 0, end = 0;
};

// One request can never be computed; the others can.
class RequestError : public Error {
 public:
  RequestError(int64_t request, ErrorCode code, const std::string& message)
      : Error(code, message), request_(request) {}
  int64_t request() const { return request_; }

 private:
  int64_t request_;
};

// Continuous batching. Requests are served in the order of their ids: an older one never waits for
// a younger one. When the pools run out although every cached prefix is gone, the youngest gives
// its memory back and is computed again later; so the oldest always makes progress.
class Scheduler {
 public:
  // caches outlives this and holds one request of its longest context.
  Scheduler(CacheSet& caches, SchedulerLimits limits);

  void add(std::unique_ptr<Request> request);  // ids ascend

  // The next pass: one token of every running request that needs no more (by age, or with
  // group_prefixes those that begin with the same pages side by side), then parts of prompts, then
  // new requests, within the limits. Their cache slots are ready. Valid until the next call of any
  // member. Throws RequestError{out_of_memory} when a request that runs alone finds no memory: the
  // caller removes it before it calls again.
  std::span<const Chunk> schedule();

  // Takes a request out and frees what it holds; null when unknown.
  std::unique_ptr<Request> remove(int64_t id);
  Request* find(int64_t id);

  // Gives back the memory of the youngest running request, which will be computed again. False:
  // none runs.
  bool preempt_youngest();

  bool idle() const { return waiting_.empty() && running_.empty(); }
  int64_t preemptions() const { return preemptions_; }
  // Tokens of the requests admitted, and how many of them the prefix cache served.
  int64_t prefix_queries() const { return prefix_queries_; }
  int64_t prefix_hits() const { return prefix_hits_; }

 private:
  void schedule_running(bool decodes);
  void admit_waiting();
  bool admit(Request& request);
  bool make_room(Request& request, const Chunk& chunk);
  Chunk next_chunk(Request& request) const;
  void accept(const Chunk& chunk);
  void group_by_prefix();  // the chunks of decodes

  CacheSet& caches_;
  SchedulerLimits limits_;
  std::deque<std::unique_ptr<Request>> waiting_;   // ascending ids, all above those running
  std::vector<std::unique_ptr<Request>> running_;  // ascending ids
  std::vector<Chunk> chunks_;
  std::vector<std::pair<PageLandmarks, Chunk>> decodes_;  // scratch
  int32_t tokens_left_ = 0;
  int32_t prompt_rows_left_ = 0;
  int64_t preemptions_ = 0, prefix_queries_ = 0, prefix_hits_ = 0;
};

}  // namespace fovea
