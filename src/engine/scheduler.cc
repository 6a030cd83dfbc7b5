// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <fmt/core.h>

#include <algorithm>
#include <utility>

namespace fovea {
namespace {

int64_t id_of(const std::unique_ptr<Request>& request) { return request->id; }

[[noreturn]] void fail_alone(const Request& request, int32_t tokens) {
  throw RequestError(
      request.id, ErrorCode::out_of_memory,
      fmt::format("the pools cannot hold {} tokens of request {} alone", tokens, request.id));
}

}  // namespace

// Reserves the lists for all requests that can run, so that no request is lost between them when
// memory runs out.
Scheduler::Scheduler(CacheSet& caches, SchedulerLimits limits) : caches_(caches), limits_(limits) {
  running_.reserve(static_cast<size_t>(limits.max_running));
  chunks_.reserve(static_cast<size_t>(limits.max_running));
}

void Scheduler::add(std::unique_ptr<Request> request) { waiting_.push_back(std::move(request)); }

std::span<const Chunk> Scheduler::schedule() {
  chunks_.clear();
  tokens_left_ = limits_.max_batch_tokens;
  prompt_rows_left_ = limits_.max_prompt_rows;
  const int64_t preemptions = preemptions_;
  schedule_running(true);
  const int32_t withheld = withheld_from_prompts();
  tokens_left_ -= withheld;
  schedule_running(false);
  // A request that was preempted just now would be preempted again after its admission.
  if (preemptions_ == preemptions) admit_waiting();
  tokens_left_ += withheld;  // drafts may take them
  if (limits_.group_prefixes) group_by_prefix();
  return chunks_;
}

// Returns how many of the tokens that the decodes have left no prompt may take.
int32_t Scheduler::withheld_from_prompts() const {
  if (chunks_.empty()) return 0;
  const auto decodes = static_cast<int32_t>(chunks_.size());
  const int32_t prompts = std::max(limits_.max_mixed_tokens - decodes, kMinPromptTokens);
  return std::max(tokens_left_ - prompts, 0);
}

void Scheduler::group_by_prefix() {
  const auto end = std::ranges::find_if(
      chunks_, [](const Chunk& chunk) { return chunk.request->remaining() > 1; });
  decodes_.clear();
  for (const Chunk& chunk : std::span(chunks_.begin(), end)) {
    const CacheLease& lease = chunk.request->lease;
    const auto held = static_cast<size_t>(lease.tokens);
    decodes_.emplace_back(
        page_landmarks(caches_.table().row(lease.row).first(held), caches_.page_size()), chunk);
  }
  std::ranges::stable_sort(decodes_, {}, [](const auto& decode) { return decode.first; });
  std::ranges::transform(decodes_, chunks_.begin(),
                         [](const auto& decode) { return decode.second; });
}

void Scheduler::schedule_running(bool decodes) {
  // Preemption removes requests from the end of running_.
  for (size_t i = 0; i < running_.size() && tokens_left_ > 0; ++i) {
    Request& request = *running_[i];
    if (request.draws_last() || (request.remaining() == 1) != decodes) continue;
    const Chunk chunk = next_chunk(request);
    if (chunk.begin < chunk.end && make_room(request, chunk)) accept(chunk);
  }
}

bool Scheduler::make_room(Request& request, const Chunk& chunk) {
  while (!caches_.extend(request.lease, chunk.begin, chunk.end)) {
    if (running_.size() == 1) {
      // The prefix cache may hold a second copy of this request's beginning. It cannot be evicted
      // while the request uses cached pages that follow it. After a new admission the request uses
      // that copy.
      if (request.computed <= request.retried_at) {
        fail_alone(request, chunk.end);
      }
      request.retried_at = request.computed;
    }
    const bool itself = running_.back().get() == &request;
    preempt_youngest();
    if (itself) return false;
  }
  return true;
}

void Scheduler::admit_waiting() {
  while (!waiting_.empty() && tokens_left_ > 0 &&
         running_.size() < static_cast<size_t>(limits_.max_running)) {
    Request& request = *waiting_.front();
    if (request.scores_prompt() && prompt_rows_left_ == 0) return;
    if (request.pending > 0) return;  // preempted; its tokens are not all known yet
    if (!admit(request)) {
      if (!running_.empty()) return;
      fail_alone(request, request.length());
    }
    if (!request.cached_tokens) request.cached_tokens = request.lease.cached_tokens;
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

bool Scheduler::admit(Request& request) {
  // Keeps one page for each running request, so that the admission does not force a preemption at
  // once.
  std::optional<CacheLease> lease =
      caches_.admit({request.tokens, request.salt}, !request.scores_prompt(),
                    static_cast<int64_t>(running_.size()));
  if (!lease) return false;
  request.lease = std::move(*lease);
  request.computed = request.lease.cached_tokens;
  const Chunk chunk = next_chunk(request);
  const auto give_back = [&] {
    caches_.release(request.lease);
    request.computed = 0;
  };
  try {
    if (!caches_.extend(request.lease, chunk.begin, chunk.end)) {
      give_back();
      return false;
    }
  } catch (...) {
    give_back();
    throw;
  }
  accept(chunk);
  if (caches_.prefix_cache() && !request.scores_prompt()) {
    prefix_queries_ += request.length();
    prefix_hits_ += request.computed;
  }
  return true;
}

Chunk Scheduler::next_chunk(Request& request) const {
  const int32_t begin = request.computed;
  int32_t max_tokens = tokens_left_;
  if (request.scores_prompt()) max_tokens = std::min(max_tokens, prompt_rows_left_);
  int32_t end = begin + std::min(max_tokens, request.remaining());
  if (caches_.has_state() && caches_.prefix_cache()) {
    // States can be snapshotted at page boundaries only. The last useful boundary for a later
    // request with the same tokens precedes the last token.
    const int32_t page_size = caches_.page_size();
    const int32_t last_boundary = (request.scheduled() - 1) / page_size * page_size;
    const int32_t aligned = std::min(end, last_boundary) / page_size * page_size;
    if (aligned > begin) end = aligned;
  }
  return {.request = &request, .begin = begin, .end = end};
}

void Scheduler::accept(const Chunk& chunk) {
  chunks_.push_back(chunk);
  tokens_left_ -= chunk.end - chunk.begin;
  if (chunk.request->scores_prompt()) prompt_rows_left_ -= chunk.end - chunk.begin;
}

int32_t Scheduler::add_drafts(size_t chunk, int32_t wanted) {
  Chunk& extended = chunks_[chunk];
  const int32_t count = std::min(wanted, tokens_left_);
  if (count <= 0) return 0;
  CacheLease& lease = extended.request->lease;
  if (!caches_.extend(lease, extended.begin, extended.end + count) ||
      !caches_.hold_draft_states(lease, count)) {
    caches_.truncate(lease, extended.end);
    return 0;
  }
  extended.drafts = count;
  tokens_left_ -= count;
  return count;
}

bool Scheduler::preempt_youngest() {
  if (running_.empty()) return false;
  Request* const youngest = running_.back().get();
  waiting_.push_front(std::move(running_.back()));
  running_.pop_back();
  for (const Chunk& chunk : chunks_) {
    if (chunk.request != youngest) continue;
    tokens_left_ += chunk.end - chunk.begin;
    if (youngest->scores_prompt()) prompt_rows_left_ += chunk.end - chunk.begin;
  }
  std::erase_if(chunks_, [&](const Chunk& chunk) { return chunk.request == youngest; });
  caches_.release(youngest->lease);
  youngest->computed = 0;
  ++youngest->preemptions;
  ++preemptions_;
  return true;
}

Request* Scheduler::find(int64_t id) {
  if (const auto found = std::ranges::find(running_, id, id_of); found != running_.end())
    return found->get();
  const auto found = std::ranges::find(waiting_, id, id_of);
  return found == waiting_.end() ? nullptr : found->get();
}

std::unique_ptr<Request> Scheduler::remove(int64_t id) {
  const auto take = [&](auto& requests) -> std::unique_ptr<Request> {
    const auto found = std::ranges::find(requests, id, id_of);
    if (found == requests.end()) return nullptr;
    std::unique_ptr<Request> taken = std::move(*found);
    requests.erase(found);
    return taken;
  };
  std::unique_ptr<Request> request = take(running_);
  if (!request) request = take(waiting_);
  if (request) caches_.release(request->lease);
  return request;
}

}  // namespace fovea
