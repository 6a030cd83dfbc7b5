// SPDX-License-Identifier: Apache-2.0
// Copies in flight. The policy of the launch decides when they take place: as early or as late as
// allowed. Until then their destination is NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#include "emulation/here.h"

namespace fovea::emulation {

// A thread's cp.async.
struct SmallCopy {
  void* to;
  const void* from;
  size_t size, bytes;  // `bytes` are read, the rest is zero

  void land() const {
    std::memset(to, 0, size);
    if (bytes) std::memcpy(to, from, bytes);
  }
};

class SmallCopies {
 public:
  void add(const SmallCopy& copy, bool late) {
    if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from)) %
        copy.size) {
      fail("a copy of misaligned addresses");
    }
    open_.push_back(copy);
    ++added_;
    if (late) {
      std::memset(copy.to, kPoisonByte, copy.size);
    } else {
      land_until(added_);
    }
  }
  void commit() { groups_.push_back(added_); }
  // Lands all but the newest `pending` groups.
  void wait(size_t pending) {
    while (groups_.size() > pending) {
      land_until(groups_.front());
      groups_.pop_front();
    }
  }
  uint64_t added() const { return added_; }
  // Lands the first `count` copies.
  void land_until(uint64_t count) {
    for (; landed_ < count; ++landed_) {
      open_.front().land();
      open_.pop_front();
    }
  }

 private:
  std::deque<SmallCopy> open_;
  std::deque<uint64_t> groups_;  // number of copies up to the end of each
  uint64_t added_ = 0, landed_ = 0;
};

// A thread's bulk copies out of shared memory. Late ones happen when the thread waits until they
// have read.
class BulkStores {
 public:
  void add(std::function<void()> store, bool late) {
    if (!late) store();
    open_.push_back(late ? std::move(store) : [] {});
  }
  void commit() {
    for (auto& store : open_) committed_.push_back(std::move(store));
    open_.clear();
  }
  void wait() {
    for (const auto& store : committed_) store();
    committed_.clear();
  }
  bool none() const { return open_.empty() && committed_.empty(); }

 private:
  std::vector<std::function<void()>> open_, committed_;
};

}  // namespace fovea::emulation
