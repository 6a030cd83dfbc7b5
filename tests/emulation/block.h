// SPDX-License-Identifier: Apache-2.0
// A block: its threads and the places where they meet. The blocks of a cluster share a Cluster.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "emulation/barriers.h"
#include "emulation/copies.h"
#include "emulation/fibers.h"

namespace fovea::emulation {

// Threads that arrived at a barrier, which then starts anew.
struct Meeting {
  int arrived = 0;
  uint64_t count = 0;  // completed meetings
  // The two alternate: a thread may reach the next meeting before others have read this one.
  int yes[2] = {};  // threads that passed true

  void complete() {
    arrived = 0;
    ++count;
    yes[count % 2] = 0;
  }
};

// An instruction of a whole warp. Its two sets of values alternate like `yes` above.
struct WarpMeeting {
  const char* what = "";
  uint32_t arrived = 0;
  uint64_t count = 0;
  alignas(16) std::byte values[2][kLanes * 64];
};

struct Thread {
  Fiber fiber;
  bool ended = false;
  SmallCopies copies;
  BulkStores stores;
  bool has_arrived = false;  // at the cluster's barrier, in
  uint64_t phase = 0;        // this phase
};

struct Cluster {
  std::vector<Block*> blocks;  // by rank
  Meeting meeting;
  int live = 0;  // threads that have not ended

  bool done() const { return live == 0; }
};

class Block {
 public:
  static constexpr int kNamedBarriers = 16;  // 0: __syncthreads

  Index index;
  uint32_t rank = 0;
  Cluster* cluster = nullptr;
  enum { waiting, running, ended } state = ended;
  Barriers barriers;
  char* shared = nullptr;  // all shared memory, including static arrays
  size_t shared_bytes = 0;
  bool allows_next = false;  // the next kernel may start, by any thread
  bool progressed = false;   // a thread did more in its last turn than reread memory
  // Objects that shims keep for each warpgroup of a running block.
  std::array<std::shared_ptr<void>, kMaxThreads / 128> of_warpgroups;

  void begin(uint32_t threads, char* segment, size_t bytes) {
    shared = segment;
    shared_bytes = bytes;
    barriers.begin(segment);
    state = running;
    live_ = count_ = static_cast<int>(threads);
    threads_.assign(threads, {});
    warps_.assign(threads / kLanes, {});
    named_.fill({});
    expected_.fill(0);
    allows_next = false;
    of_warpgroups.fill(nullptr);
    for (int i = 0; i < count_; ++i)
      threads_[static_cast<size_t>(i)].fiber.prepare(stacks_.of(i), &Block::enter);
  }
  Thread& thread() { return threads_[static_cast<size_t>(current_)]; }
  int current() const { return current_; }

  // Returns whether a turn could change anything.
  bool can_go() const {
    return state == waiting || std::ranges::any_of(threads_, [](const Thread& thread) {
             return !thread.ended && !thread.fiber.wait.holds();
           });
  }
  // Runs every thread as far as it can go, or until one ends the turn.
  void turn(bool descending) {
    progressed = ends_turn_ = false;
    const int warps = count_ / kLanes;
    for (bool moved = true; moved && !ends_turn_;) {
      moved = false;
      for (int warp = 0; warp < warps; ++warp) {
        while (run_warp(descending ? warps - 1 - warp : warp, descending)) moved = true;
      }
    }
  }

  void end_turn() { ends_turn_ = true; }

  // Lets other threads run until over() is true; the scheduler calls it.
  template <typename Over>
  void wait_until(const char* what, const Over& over, Wait wait = {}) {
    if (!wait.spins && over()) return;
    wait.what = what;
    wait.is_over = [](const void* with) { return (*static_cast<const Over*>(with))(); };
    wait.with = &over;
    thread().fiber.wait = wait;
    thread().fiber.leave(scheduler_);
  }

  // Returns the value of each lane of the warp for the same instruction.
  template <typename T>
  const std::array<T, kLanes>& exchange(const char* what, const T& value) {
    static_assert(sizeof(T) <= 64 && std::is_trivially_copyable_v<T>);
    WarpMeeting& meeting = warps_[static_cast<size_t>(current_ / kLanes)];
    std::byte* values = meeting.values[meeting.count % 2];
    std::memcpy(values + static_cast<size_t>(current_ % kLanes) * sizeof(T), &value, sizeof(T));
    meet_warp(meeting, what);
    return *reinterpret_cast<const std::array<T, kLanes>*>(values);
  }

  // bar.sync, bar.arrive and bar.red: returns how many threads pass true. `threads` 0 means all
  // threads that have not ended.
  int meet(int id, int threads, bool waits, bool value) {
    if (id < 0 || id >= kNamedBarriers) fail("there are 16 barriers");
    Meeting& meeting = named_[static_cast<size_t>(id)];
    int& expected = expected_[static_cast<size_t>(id)];
    if (meeting.arrived > 0 && expected != threads)
      fail("threads disagree how many a barrier is for");
    if (threads % kLanes != 0 || threads > count_)
      fail("a barrier for a part of a warp or too many");
    expected = threads;
    const uint64_t before = meeting.count;
    int& yes = meeting.yes[before % 2];
    yes += value;
    if (++meeting.arrived == (threads ? threads : live_)) meeting.complete();
    if (waits) wait_until(kNames[id], [&] { return meeting.count != before; });
    return yes;
  }

  bool spins() const {
    return std::ranges::any_of(threads_, [](const Thread& thread) {
      return !thread.ended && thread.fiber.wait.what && thread.fiber.wait.spins;
    });
  }
  void print_waits() const {
    for (int first = 0, i = 1; i <= count_; ++i) {
      if (i < count_ && waits_alike(i, first)) continue;
      print_wait(first, i - 1);
      first = i;
    }
  }

 private:
  static constexpr const char* kNames[kNamedBarriers] = {
      "__syncthreads", "barrier 1",  "barrier 2",  "barrier 3", "barrier 4",  "barrier 5",
      "barrier 6",     "barrier 7",  "barrier 8",  "barrier 9", "barrier 10", "barrier 11",
      "barrier 12",    "barrier 13", "barrier 14", "barrier 15"};

  // Where each thread begins and ends.
  static void enter();

  // Runs every lane that can run until it must wait. Returns false if none can.
  bool run_warp(int warp, bool descending) {
    bool moved = false;
    for (int i = 0; i < kLanes && !ends_turn_; ++i) {
      const int index = warp * kLanes + (descending ? kLanes - 1 - i : i);
      Thread& thread = threads_[static_cast<size_t>(index)];
      if (thread.ended || thread.fiber.wait.holds()) continue;
      const bool span = thread.fiber.wait.spins;
      resume(index);
      moved = true;
      progressed |= thread.ended || !span || !thread.fiber.wait.spins;
    }
    return moved;
  }
  void resume(int index) {
    current_ = index;
    here.thread_index.x = static_cast<uint32_t>(index);
    threads_[static_cast<size_t>(index)].fiber.wait = {};
    threads_[static_cast<size_t>(index)].fiber.enter(scheduler_);
  }

  void meet_warp(WarpMeeting& meeting, const char* what) {
    if (meeting.arrived != 0 && std::strcmp(meeting.what, what) != 0) fail("a warp has diverged");
    meeting.what = what;
    meeting.arrived |= 1u << current_ % kLanes;
    const uint64_t before = meeting.count;
    complete(meeting);
    wait_until(what, [&] { return meeting.count != before; });
  }
  // Does not wait for lanes that have ended.
  void complete(WarpMeeting& meeting) const {
    const size_t first = static_cast<size_t>(&meeting - warps_.data()) * kLanes;
    for (size_t i = 0; i < kLanes; ++i) {
      if (!(meeting.arrived >> i & 1) && !threads_[first + i].ended) return;
    }
    meeting.arrived = 0;
    ++meeting.count;
  }

  void end_thread() {
    Thread& thread = this->thread();
    thread.ended = true;
    if (!thread.stores.none()) fail("a thread has ended before its stores have read shared memory");
    Meeting& in_cluster = cluster->meeting;
    if (thread.has_arrived && thread.phase == in_cluster.count) --in_cluster.arrived;
    if (--cluster->live > 0 && in_cluster.arrived == cluster->live) in_cluster.complete();
    WarpMeeting& meeting = warps_[static_cast<size_t>(current_ / kLanes)];
    if (meeting.arrived != 0) complete(meeting);
    --live_;
    for (size_t id = 0; id < kNamedBarriers; ++id) {
      if (expected_[id] == 0 && live_ > 0 && named_[id].arrived == live_) named_[id].complete();
    }
    if (live_ > 0) return;
    state = ended;
    barriers.end();
  }

  bool waits_alike(int a, int b) const {
    const Thread& one = threads_[static_cast<size_t>(a)];
    const Thread& other = threads_[static_cast<size_t>(b)];
    return one.ended == other.ended && one.fiber.wait.what == other.fiber.wait.what &&
           one.fiber.wait.barrier == other.fiber.wait.barrier &&
           one.fiber.wait.parity == other.fiber.wait.parity;
  }
  void print_wait(int first, int last) const {
    const Thread& thread = threads_[static_cast<size_t>(first)];
    const Wait& wait = thread.fiber.wait;
    if (thread.ended) return;
    std::fprintf(stderr, "  block %u, %u threads %d to %d: %s", index.x, index.y, first, last,
                 wait.what ? wait.what : "can run");
    if (wait.barrier >= 0) {
      const Barrier& barrier = barriers.unchecked(static_cast<uint32_t>(wait.barrier));
      std::fprintf(stderr, " at %#x for parity %u (phase %u lacks %d of %d arrivals, %d bytes)",
                   wait.barrier, wait.parity, barrier.phase, barrier.pending, barrier.arrivals,
                   barrier.bytes);
    }
    std::fputc('\n', stderr);
  }

  Stacks stacks_;
  std::vector<Thread> threads_;
  std::vector<WarpMeeting> warps_;
  std::array<Meeting, kNamedBarriers> named_;
  std::array<int, kNamedBarriers> expected_ = {};
  int count_ = 0, live_ = 0;
  int current_ = 0;
  bool ends_turn_ = false;
  jmp_buf scheduler_;
};

}  // namespace fovea::emulation
