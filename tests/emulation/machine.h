// SPDX-License-Identifier: Apache-2.0
// Blocks of GPU threads on one core. Each thread has a stack of its own and runs until it must meet
// others, which then run. A value that is read before the barrier it needs is usually not yet
// written, in one order of threads or the other, and copies land as early or as late as allowed.
// This does not search all orders for races. Shared memory is NaN before each block. A kernel that
// cannot continue ends the process with the reason.
//
// This header has the primitives that instructions are made of.
#pragma once

#include "emulation/run.h"

namespace fovea::emulation {

class Machine {
 public:
  [[noreturn]] void fail(const char* why) const { emulation::fail(why); }
  const Policy& policy() const { return here.run->policy(); }
  Block& block() const { return *here.block; }

  template <typename Over>
  void wait_until(const char* what, const Over& over) const {
    block().wait_until(what, over);
  }
  // Called in a loop that reads memory until another thread has written. All other threads run
  // first.
  void spin(const char* what) const {
    const uint64_t now = here.run->round();
    const auto over = [&] { return here.run->round() != now; };
    block().wait_until(what, over, {.spins = true});
  }
  // Called after an access to a counter in memory by which blocks synchronize. All other threads
  // run first, including threads of this block that have not reached the counter.
  void counted() const {
    if (!policy().arrivals_yield) return;
    block().end_turn();
    spin("others, behind its count");
  }
  // Waits until no other thread can run and no awaited copy is in flight.
  void settle(const char* what) const {
    const uint64_t now = here.run->round();
    const auto over = [&] { return here.run->round() != now && here.run->is_idle(); };
    block().wait_until(what, over, {.spins = true});
  }
  int64_t clock() const { return static_cast<int64_t>(here.run->round()) * kClockOfRound; }

  template <typename T>
  const std::array<T, kLanes>& exchange(const char* what, const T& value) const {
    return block().exchange(what, value);
  }
  int named_barrier(int id, int threads, bool waits, bool value = false) const {
    return block().meet(id, threads, waits, value);
  }

  // Shared memory has 32-bit addresses: offsets in the own block's memory, or in that of block
  // `rank` of the cluster.
  uint32_t shared_address(const void* own) const {
    const auto offset = static_cast<const char*>(own) - block().shared;
    if (offset < 0 || static_cast<size_t>(offset) >= block().shared_bytes) {
      fail("an address is not in shared memory");
    }
    return static_cast<uint32_t>(offset);
  }
  char* shared_pointer(uint32_t address) const {
    return block_of(address).shared + offset_of(address);
  }
  uint32_t map_shared(uint32_t address, uint32_t rank) const {
    if (rank >= block().cluster->blocks.size()) fail("the cluster has no such block");
    return offset_of(address) | (rank + 1) << kOffsetBits;
  }
  uint32_t cluster_rank() const { return block().rank; }

  void cluster_arrive() const {
    Thread& thread = block().thread();
    Meeting& meeting = block().cluster->meeting;
    if (thread.has_arrived) fail("a thread arrives twice at the barrier of its cluster");
    thread.has_arrived = true;
    thread.phase = meeting.count;
    if (++meeting.arrived == block().cluster->live) meeting.complete();
  }
  void cluster_wait() const {
    Thread& thread = block().thread();
    if (!thread.has_arrived) fail("a thread waits for its cluster without arriving");
    block().wait_until("the cluster",
                       [&] { return block().cluster->meeting.count != thread.phase; });
    thread.has_arrived = false;
  }

  void init_barrier(uint32_t address, int arrivals) const {
    block().barriers.init(offset_of(address), arrivals);
  }
  void fence_barriers() const { block().barriers.fence(); }
  Barrier& barrier(uint32_t address) const {
    return block_of(address).barriers.at(offset_of(address));
  }
  void arrive(uint32_t address) const {
    barrier(address).arrive();
    if (policy().arrivals_yield) spin("others, behind its arrival");
  }
  void wait_barrier(uint32_t address, uint32_t parity) const {
    Barrier& at = barrier(address);
    ++at.waiting;
    block().wait_until("an mbarrier", [&] { return at.has_passed(parity); },
                       {.barrier = static_cast<int>(offset_of(address)), .parity = parity});
    --at.waiting;
  }

  // Starts a cp.async.
  void copy(const SmallCopy& copy) const {
    block().thread().copies.add(copy, here.run->chooses_late());
  }
  void commit_copies() const { block().thread().copies.commit(); }
  void wait_copies(size_t pending) const { block().thread().copies.wait(pending); }
  void arrive_after_copies(uint32_t address) const {
    Block& own = block();
    Barrier& at = barrier(address);
    SmallCopies& copies = own.thread().copies;
    here.run->land_at(
        own, offset_of(address),
        [&at, &copies, count = copies.added()] {
          copies.land_until(count);
          at.arrive();
        },
        here.run->chooses_late());
  }

  // Starts a bulk copy to shared memory. Its bytes count at the barrier after land(to) was called.
  void copy_bulk(uint32_t to, uint32_t bytes, uint32_t barrier_address,
                 std::function<void(char* to)> land) const {
    Block& there = block_of(to);
    Barrier& at = barrier(barrier_address);
    if (&there != &block_of(barrier_address)) fail("a copy counts in another block");
    if (!at.fenced) fail("a copy counts at an mbarrier that no fence has shown to it");
    if (offset_of(to) + bytes > there.shared_bytes) fail("a copy ends behind the shared memory");
    char* place = shared_pointer(to);
    const bool late = here.run->chooses_late();
    if (late) std::memset(place, kPoisonByte, bytes);
    here.run->land_at(
        there, offset_of(barrier_address),
        [&at, place, bytes, land = std::move(land)] {
          land(place);
          at.land(static_cast<int>(bytes));
        },
        late);
  }
  void store_bulk(std::function<void()> store) const {
    block().thread().stores.add(std::move(store), here.run->chooses_late());
  }
  void commit_stores() const { block().thread().stores.commit(); }
  void wait_stores_read() const { block().thread().stores.wait(); }

  void wait_for_previous_kernel() const {
    wait_until("the previous kernel", [] { return here.run->previous_is_over(); });
  }
  void allow_next_kernel() const { block().allows_next = true; }

 private:
  static constexpr uint32_t kOffsetBits = 24;
  static constexpr int64_t kClockOfRound = 64;

  static uint32_t offset_of(uint32_t address) { return address & ((1u << kOffsetBits) - 1); }
  Block& block_of(uint32_t address) const {
    const uint32_t rank = address >> kOffsetBits;
    if (rank == 0) return block();
    Block& there = *block().cluster->blocks[rank - 1];
    if (there.state == Block::waiting) fail("a block of the cluster has not started");
    if (there.state == Block::ended) fail("a block of the cluster has ended");
    return there;
  }
};

inline Machine machine;

}  // namespace fovea::emulation
