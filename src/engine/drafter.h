// SPDX-License-Identifier: Apache-2.0
// Guesses the next tokens of requests, for one pass to verify.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/request.h"

namespace fovea {

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Sets Request::chain of each request to its last token and up to `max_drafts` guesses of those
  // after it, at most Request::max_drafts(). All other tokens of the request are in the caches.
  virtual void draft(std::span<Request* const> requests, int32_t max_drafts) = 0;
  // Frees what belongs to a request; unknown ids are ignored.
  virtual void forget(int64_t request) = 0;
  // Drops cached prefixes that no request uses.
  virtual void clear() {}
};

// Guesses by NgramIndex.
std::unique_ptr<Drafter> make_ngram_drafter();

}  // namespace fovea
