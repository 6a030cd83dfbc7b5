// SPDX-License-Identifier: Apache-2.0
// Maps slots to the tokens that write to them: a hash table that every plan() refills.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace fovea {

class SlotSet {
 public:
  SlotSet() = default;
  // Has room for max_tokens tokens. Throws Error{out_of_memory} naming them.
  explicit SlotSet(int32_t max_tokens);
  // Removes all slots in constant time.
  void clear();
  // Returns the earlier token that has this slot, if there is one; otherwise adds `token`. At most
  // max_tokens tokens may be added between two calls of clear().
  std::optional<int32_t> add(int64_t slot, int32_t token);

 private:
  struct Entry {
    int64_t slot = 0;
    int32_t token = 0;
    uint32_t round = 0;  // an entry of an earlier round is free
  };

  std::vector<Entry> entries_;  // a power of two, at least twice as many as tokens
  uint32_t round_ = 0;
  int shift_ = 0;
};

}  // namespace fovea
