// SPDX-License-Identifier: Apache-2.0
// The mbarriers of a block. Their misuse is undefined on a GPU; here it ends the process.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>

#include "emulation/here.h"

namespace fovea::emulation {

struct Barrier {
  static constexpr int kMaxBytes = (1 << 20) - 1;  // in flight, or landed before they were expected

  int arrivals = 0;  // per phase
  int pending = 0;   // in this phase
  int bytes = 0;     // expected and not yet landed
  uint32_t phase = 0;
  int waiting = 0;  // waiting threads
  bool fenced = false;

  bool has_passed(uint32_t parity) const { return (phase & 1) != (parity & 1); }
  void arrive() {
    if (pending == 0) fail("an mbarrier has more arrivals than it was made for");
    --pending;
    complete();
  }
  void expect(int more) {
    bytes += more;
    if (bytes > kMaxBytes) fail("an mbarrier expects more bytes than it can count");
  }
  void land(int landed) {
    bytes -= landed;
    if (bytes < -kMaxBytes) fail("more bytes have landed than an mbarrier can count");
    complete();
  }

 private:
  void complete() {
    if (pending != 0 || bytes != 0) return;
    ++phase;
    pending = arrivals;
  }
};

// Barriers by their offset in the block's shared memory. A word at each offset detects writes over
// the barrier.
class Barriers {
 public:
  void begin(char* shared) {
    shared_ = shared;
    barriers_.clear();
  }
  void init(uint32_t offset, int arrivals) {
    if (offset % 8 != 0) fail("a misaligned mbarrier");
    if (arrivals <= 0 || arrivals > Barrier::kMaxBytes) fail("an mbarrier without arrivals");
    Barrier& barrier = barriers_[offset];
    if (barrier.waiting > 0) fail("an mbarrier is made anew while threads wait for it");
    barrier = {.arrivals = arrivals, .pending = arrivals};
    const uint64_t word = word_of(offset);
    std::memcpy(shared_ + offset, &word, sizeof(word));
  }
  Barrier& at(uint32_t offset) {
    const auto found = barriers_.find(offset);
    if (found == barriers_.end()) fail("an mbarrier is used before it was made");
    uint64_t word;
    std::memcpy(&word, shared_ + offset, sizeof(word));
    if (word != word_of(offset)) fail("an mbarrier was written over");
    return found->second;
  }
  const Barrier& unchecked(uint32_t offset) const { return barriers_.at(offset); }
  // Makes new barriers visible to bulk copies.
  void fence() {
    for (auto& [offset, barrier] : barriers_) barrier.fenced = true;
  }
  void end() const {
    for (const auto& [offset, barrier] : barriers_) {
      if (barrier.bytes != 0) fail("a block has ended while an mbarrier expected bytes");
    }
  }

 private:
  static uint64_t word_of(uint32_t offset) { return 0x6d62617272696572ull ^ offset; }

  char* shared_ = nullptr;
  std::map<uint32_t, Barrier> barriers_;
};

}  // namespace fovea::emulation
