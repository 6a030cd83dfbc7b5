// SPDX-License-Identifier: Apache-2.0
// Which token of a batch writes to which slot: a hash table that every plan() fills anew.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace fovea {

class SlotSet {
 public:
  SlotSet() = default;
  // With room for that many tokens. Error{out_of_memory} names them.
  explicit SlotSet(int32_t max_tokens);
  // Forgets all slots, in constant time.
  void clear();
  // The earlier token that has this slot, if there is one; else `token` has it from now on. At most
  // max_tokens tokens are added between two calls of clear().
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
