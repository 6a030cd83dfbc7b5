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
  // Sets Request::drafts of each request to its last token and up to `max_drafts` guesses of those
  // after it, at most Request::max_drafts(). No token has more than `branches` guesses after it.
  // All other tokens of the request are in the caches.
  virtual void draft(std::span<Request* const> requests, int32_t max_drafts, int32_t branches) = 0;
  // Returns how many drafts of the request's chain count as accepted whatever its draws say; -1:
  // those that it draws. For measurements, whose text means nothing.
  virtual int32_t accepted_anyway(const Request&) const { return -1; }
  // Returns how long the device computed in the last draft().
  virtual double device_seconds() const { return 0; }
  // Frees what belongs to a request; unknown ids are ignored.
  virtual void forget(int64_t request) = 0;
  // Drops cached prefixes that no request uses.
  virtual void clear() {}
};

// Guesses by NgramIndex.
std::unique_ptr<Drafter> make_ngram_drafter();

// Makes random drafts, of which so many are accepted that a step of max_drafts drafts yields
// `length` tokens on average, 1 to max_drafts + 1. Each draft is accepted as often as the others.
std::unique_ptr<Drafter> make_oracle_drafter(double length, int32_t max_drafts, int32_t vocabulary);

}  // namespace fovea
