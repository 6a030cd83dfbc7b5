// SPDX-License-Identifier: Apache-2.0
// Guesses the next tokens of requests, for one pass to verify.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/request.h"

namespace fovea {

// The tokens that a pass in flight draws after a request's last token and each of its drafts. The
// first of them become its text, as far as the drafts before them are right.
struct DrawnText {
  Request* request = nullptr;
  int32_t first_draw = 0, draws = 0;  // DrawnLists::model
};

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Sets Request::drafts of each request to its last token and up to `max_drafts` guesses of those
  // after it, at most Request::max_drafts(). No token has more than `branches` guesses after it.
  // All other tokens of the request are in the caches. The last draft of a chain may still be
  // unknown, see DraftTree::drawn_by; finish() makes it known.
  virtual void draft(std::span<Request* const> requests, int32_t max_drafts, int32_t branches) = 0;
  // Waits for what draft() has left to the device. A draft that could not be made stays unknown.
  // The requests must not have been changed since, but for DraftTree::keep().
  virtual void finish() {}
  // Returns true if begin_next() does something.
  virtual bool begins_next() const { return false; }
  // Enqueues the beginning of the next draft() behind the pass that draws these texts, so that the
  // device has work while the host reads them. finish() without draft() undoes it.
  virtual void begin_next(std::span<const DrawnText> /*texts*/) {}
  // Waits for what is left to the device, and forgets it: no pass has verified the drafts.
  virtual void abandon() {}
  // Returns how many drafts of the request's chain count as accepted whatever its draws say; -1:
  // those that it draws. For measurements, whose text means nothing.
  virtual int32_t accepted_anyway(const Request&) const { return -1; }
  // Returns how long the device computed in the last draft() and finish().
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
