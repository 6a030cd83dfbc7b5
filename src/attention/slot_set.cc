// SPDX-License-Identifier: Apache-2.0
#include "attention/slot_set.h"

#include <algorithm>
#include <bit>

#include "core/memory_error.h"

namespace fovea {

SlotSet::SlotSet(int32_t max_tokens) {
  const size_t size = std::bit_ceil(std::max<size_t>(2 * static_cast<size_t>(max_tokens), 2));
  name_memory([&] { entries_.assign(size, {}); }, "the slots of {} new tokens", max_tokens);
  shift_ = 64 - std::countr_zero(size);
}

void SlotSet::clear() {
  if (++round_ != 0) return;
  std::ranges::fill(entries_, Entry{});
  round_ = 1;
}

std::optional<int32_t> SlotSet::add(int64_t slot, int32_t token) {
  // Multiplicative hashing by the golden ratio spreads neighbouring slots.
  const uint64_t hash = static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15u;
  const size_t mask = entries_.size() - 1;
  for (size_t at = static_cast<size_t>(hash >> shift_);; at = (at + 1) & mask) {
    Entry& entry = entries_[at];
    if (entry.round != round_) {
      entry = {slot, token, round_};
      return std::nullopt;
    }
    if (entry.slot == slot) return entry.token;
  }
}

}  // namespace fovea
