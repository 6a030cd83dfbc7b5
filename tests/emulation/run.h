// SPDX-License-Identifier: Apache-2.0
// A launch: its blocks. As many of them are resident at once as fit the emulated GPU, whole
// clusters together. Each has a thread of the system, because shared memory is emulated by
// thread-local memory. These threads run one at a time, so that a launch always runs in the same
// order.
#pragma once

#include <link.h>

#include <algorithm>
#include <memory>
#include <semaphore>
#include <thread>
#include <utility>

#include "emulation/block.h"

namespace fovea::emulation {

// A kernel library's description of its kernel.
struct Kernel {
  uint32_t threads, blocks_per_sm;
  size_t shared_bytes, shared_limit;  // requested, and available
  char* (*shared)();                  // for the calling thread
  std::function<void()> body;
};

class Run {
 public:
  Run(const Launch& launch, const Kernel& kernel) : launch_(launch), kernel_(kernel) {
    if (kernel.threads > kMaxThreads || kernel.threads % kLanes != 0) {
      fail("threads are not 32, 64, ... 1024");
    }
    if (kernel.shared_bytes > kernel.shared_limit) fail("more shared memory than there is");
    if (launch.grid.x % launch.cluster != 0) fail("the grid is not whole clusters");
    const uint32_t alive = launch.multiprocessors * kernel.blocks_per_sm;
    clusters_alive_ = std::max(alive / launch.cluster, 1u);
    clusters_ = launch.grid.x * launch.grid.y / launch.cluster;
  }
  ~Run() {
    for (auto& slot : slots_) slot->stop();
  }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Returns false if the launch has not ended but the next kernel may start.
  bool advance(bool to_the_end) {
    const Here before = std::exchange(here, Here{});
    here.block_size = {kernel_.threads, 1, 1};
    here.grid_size = launch_.grid;
    here.run = this;
    to_the_end_ = to_the_end;
    progressed_ = true;  // the caller has progressed
    if (Slot* first = next()) {
      first->go();
      paused_.acquire();
    }
    here = before;
    if (!groups_.empty()) return false;
    if (!on_their_way_.empty()) fail("a kernel has ended before its copies");
    return true;
  }

  const Policy& policy() const { return launch_.policy; }
  const std::function<void()>& body() const { return kernel_.body; }
  uint64_t round() const { return round_; }
  // Returns whether threads only reread memory in the last round.
  bool is_idle() const { return idle_ > 0; }
  bool previous_is_over() const { return !launch_.finish_previous; }

  // Decides whether the next copy is late.
  bool chooses_late() {
    if (launch_.policy.copies != Policy::mixed) return launch_.policy.copies == Policy::late;
    coin_ = coin_ * 6364136223846793005ull + 1442695040888963407ull;
    return coin_ >> 63;
  }
  // Lands a copy at once, or when no thread can run and one waits at the barrier.
  void land_at(Block& block, uint32_t barrier, std::function<void()> land, bool late) {
    if (!late) return land();
    on_their_way_.push_back({&block, barrier, std::move(land)});
  }

  void print_waits() const {
    for (const auto& group : groups_) {
      for (const Block* block : group.cluster->blocks) block->print_waits();
    }
    for (const auto& copy : on_their_way_) {
      std::fprintf(stderr, "  a copy to block %u, %u lands at %#x\n", copy.block->index.x,
                   copy.block->index.y, copy.barrier);
    }
  }

 private:
  static constexpr int kPatience = 1 << 20;  // rounds in which threads only reread memory

  // A thread of the system. Blocks run on it one after another.
  class Slot {
   public:
    explicit Slot(Run& run) : run_(run), thread_([this] { serve(); }) {}
    Block block;

    // Starts its turn, and the turns after it.
    void go() { go_.release(); }
    void stop() {
      stops_ = true;
      go_.release();
      thread_.join();
    }

   private:
    void serve() {
      while (true) {
        go_.acquire();
        if (stops_) return;
        Slot* next = this;
        while (next == this) {
          turn();
          next = run_.next();
        }
        next ? next->go() : run_.paused_.release();
      }
    }
    void turn() {
      if (block.state == Block::waiting) {
        const auto [segment, bytes] = poison(run_.kernel_.shared());
        block.begin(run_.kernel_.threads, segment, bytes);
      }
      here.block_index = block.index;
      block.turn(run_.policy().descending);
      run_.progressed_ |= block.progressed;
      if (block.state == Block::ended) check_end();
    }
    void check_end() const {
      const char* shared = run_.kernel_.shared();
      for (size_t at = run_.kernel_.shared_bytes; at < run_.kernel_.shared_limit; ++at) {
        if (shared[at] != static_cast<char>(kPoisonByte)) fail("written behind the shared memory");
      }
    }

    Run& run_;
    bool stops_ = false;
    std::binary_semaphore go_{0};
    std::thread thread_;
  };
  struct Group {
    std::unique_ptr<Cluster> cluster;
    std::vector<Slot*> slots;
  };
  struct OnItsWay {
    Block* block;
    uint32_t barrier;
    std::function<void()> land;
  };

  void start_clusters() {
    while (started_ < clusters_ && groups_.size() < clusters_alive_) {
      const uint32_t number = launch_.policy.descending ? clusters_ - 1 - started_ : started_;
      ++started_;
      Group group{std::make_unique<Cluster>(), {}};
      for (uint32_t rank = 0; rank < launch_.cluster; ++rank) {
        if (free_.empty())
          free_.push_back(slots_.emplace_back(std::make_unique<Slot>(*this)).get());
        Slot& slot = *free_.back();
        free_.pop_back();
        const uint32_t block = number * launch_.cluster + rank;
        slot.block.index = {block % launch_.grid.x, block / launch_.grid.x, 0};
        slot.block.rank = rank;
        slot.block.cluster = group.cluster.get();
        slot.block.state = Block::waiting;
        group.cluster->blocks.push_back(&slot.block);
        group.slots.push_back(&slot);
      }
      group.cluster->live = static_cast<int>(launch_.cluster * kernel_.threads);
      groups_.push_back(std::move(group));
    }
  }

  bool next_may_start() const {
    if (started_ < clusters_) return false;
    for (const Group& group : groups_) {
      for (const Slot* slot : group.slots) {
        const Block& block = slot->block;
        if (block.state == Block::waiting) return false;
        if (block.state == Block::running && !block.allows_next) return false;
      }
    }
    return true;
  }

  // Returns the slot with the next turn. Null: the launch has ended or, if that suffices, the next
  // one may start.
  Slot* next() {
    while (true) {
      while (!turns_.empty()) {
        Slot* slot = turns_.front();
        turns_.pop_front();
        here.block = &slot->block;
        if (slot->block.can_go()) return slot;
      }
      if (round_ > 0) end_round();
      start_clusters();
      if (groups_.empty() || (!to_the_end_ && next_may_start())) return nullptr;
      ++round_;
      progressed_ = false;
      for (const Group& group : groups_) {
        turns_.insert(policy().descending ? turns_.begin() : turns_.end(), group.slots.begin(),
                      group.slots.end());
      }
    }
  }

  // All blocks have run as far as they could. If none progressed, finds something that lets one
  // continue.
  void end_round() {
    std::erase_if(groups_, [&](const Group& group) {
      if (!group.cluster->done()) return false;
      free_.insert(free_.end(), group.slots.begin(), group.slots.end());
      return true;
    });
    if (progressed_ || land_some()) {
      idle_ = 0;
    } else if (launch_.finish_previous) {
      std::exchange(launch_.finish_previous, nullptr)();
    } else if (++idle_ > kPatience || !anyone_spins()) {
      fail("nobody can go on");
    }
  }

  // Lands all copies that one barrier waits for.
  bool land_some() {
    const auto is_awaited = [](const OnItsWay& copy) {
      return copy.block->barriers.at(copy.barrier).waiting > 0;
    };
    const OnItsWay* chosen = nullptr;
    for (const OnItsWay& copy : on_their_way_) {
      if (!is_awaited(copy)) continue;
      chosen = &copy;
      if (!policy().descending) break;
    }
    if (!chosen) return false;
    const Block* block = chosen->block;
    const uint32_t barrier = chosen->barrier;
    std::vector<std::function<void()>> landing;
    std::erase_if(on_their_way_, [&](OnItsWay& copy) {
      if (copy.block != block || copy.barrier != barrier) return false;
      landing.push_back(std::move(copy.land));
      return true;
    });
    for (const auto& land : landing) land();
    return true;
  }
  bool anyone_spins() const {
    for (const Group& group : groups_) {
      for (const Block* block : group.cluster->blocks) {
        if (block->spins()) return true;
      }
    }
    return false;
  }

  struct Segment {
    char* begin;
    size_t bytes;
  };
  // Fills all thread-local memory of this module, which emulates shared memory, with NaN.
  static Segment poison(const char* inside) {
    struct Search {
      const char* inside;
      Segment found;
    } search{inside, {}};
    const auto visit = [](dl_phdr_info* module, size_t, void* context) {
      auto& [inside, found] = *static_cast<Search*>(context);
      for (int i = 0; i < module->dlpi_phnum; ++i) {
        const auto& segment = module->dlpi_phdr[i];
        auto* begin = static_cast<char*>(module->dlpi_tls_data);
        if (segment.p_type != PT_TLS || !begin || inside < begin ||
            inside >= begin + segment.p_memsz) {
          continue;
        }
        found = {begin, segment.p_memsz};
        return 1;
      }
      return 0;
    };
    if (!dl_iterate_phdr(visit, &search)) std::abort();
    std::memset(search.found.begin, kPoisonByte, search.found.bytes);
    return search.found;
  }

  Launch launch_;
  Kernel kernel_;
  uint32_t clusters_, clusters_alive_;
  uint32_t started_ = 0;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> free_;
  std::vector<Group> groups_;  // running groups
  std::deque<OnItsWay> on_their_way_;
  std::deque<Slot*> turns_;  // remaining turns of this round
  bool progressed_ = false;  // any slot, in this round
  bool to_the_end_ = false;
  std::binary_semaphore paused_{0};
  uint64_t round_ = 0;
  uint64_t coin_ = 1;
  int idle_ = 0;
};

// Never returns: the stack ends here.
inline void Block::enter() {
  here.run->body()();
  Block& block = *here.block;
  block.end_thread();
  block.thread().fiber.leave(block.scheduler_);
}

inline void fail(const char* why) {
  std::fprintf(stderr, "block %u, %u thread %u: %s\n", here.block_index.x, here.block_index.y,
               here.thread_index.x, why);
  if (here.run) here.run->print_waits();
  std::abort();
}

}  // namespace fovea::emulation
