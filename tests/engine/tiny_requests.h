// SPDX-License-Identifier: Apache-2.0
// Requests of a scheduler without a model.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/cache_set.h"
#include "engine/request.h"
#include "engine/scheduler.h"

namespace fovea {

inline std::unique_ptr<Request> make_request(int64_t id, int32_t prompt, int32_t new_tokens,
                                             int32_t token = 1) {
  auto request = std::make_unique<Request>();
  request->id = id;
  request->tokens.assign(static_cast<size_t>(prompt), token);
  request->prompt_tokens = prompt;
  request->sampling.max_new_tokens = new_tokens;
  return request;
}

// Runs one pass without a model: every next token is 1. Returns the number of computed tokens.
inline int32_t run_pass(Scheduler& scheduler, CacheSet& caches) {
  int32_t computed = 0;
  const std::span<const Chunk> chunks = scheduler.schedule();
  for (const Chunk& chunk : std::vector<Chunk>(chunks.begin(), chunks.end())) {
    Request& request = *chunk.request;
    EXPECT_EQ(chunk.begin, request.computed);
    EXPECT_LT(chunk.begin, chunk.end);
    EXPECT_LE(chunk.end, request.length());
    EXPECT_GE(request.lease.tokens, chunk.end);
    computed += chunk.end - chunk.begin;
    request.computed = chunk.end;
    caches.publish(request.lease,
                   {std::span(request.tokens).first(static_cast<size_t>(chunk.end)), request.salt});
    if (request.remaining() > 0) continue;
    request.tokens.push_back(1);
    if (request.generated() == request.sampling.max_new_tokens) scheduler.remove(request.id);
  }
  return computed;
}

}  // namespace fovea
