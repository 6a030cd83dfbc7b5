// SPDX-License-Identifier: Apache-2.0
// Blocks of GPU threads on one core: each thread has a stack of its own and runs until it must meet
// others, who then take their turn. A value that is read before the barrier it needs is mostly not
// written yet, in one order of threads or the other; that is no search for races. Shared memory is
// NaN before each block. A block that cannot go on ends the process with the reason.
#pragma once

#include <link.h>
#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace fovea::emulation {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;
constexpr int kPoisonByte = 0xff;

struct Index {
  uint32_t x = 0, y = 0, z = 0;
};

// Meetings are counted: whoever has arrived waits until the count moves.
struct Meeting {
  const char* what = "";
  int arrived = 0;
  uint64_t count = 0;
};

// Two sets of values: a lane may be one meeting ahead of another that still reads.
struct Warp {
  Meeting meeting;
  alignas(16) std::byte values[2][kLanes * 64];
};

struct Copy {
  void* to;
  const void* from;
  size_t size, bytes;  // bytes are read, the rest is zero
};

struct Thread {
  ucontext_t start;
  jmp_buf resume;
  const Meeting* waits_at;
  uint64_t waits_beyond;
  bool begun, done;
  std::vector<std::vector<Copy>> groups;  // committed and not yet waited for
  std::vector<Copy> open;
};

class Machine {
 public:
  Index thread_index, block_index, block_size, grid_size;

  // Runs `body` as every thread of every block. shared: the `shared_limit` bytes of dynamic shared
  // memory, of which the kernel has asked for `shared_bytes`.
  void launch(Index grid, uint32_t threads, bool descending, char* shared, size_t shared_bytes,
              size_t shared_limit, std::function<void()> body) {
    if (threads > kMaxThreads || threads % kLanes != 0) fail("threads are not 32, 64, ... 1024");
    if (shared_bytes > shared_limit) fail("more shared memory than there is");
    grid_size = grid;
    block_size = {threads, 1, 1};
    descending_ = descending;
    body_ = std::move(body);
    const uint32_t blocks = grid.x * grid.y;
    for (uint32_t i = 0; i < blocks; ++i) {
      const uint32_t block = descending ? blocks - 1 - i : i;
      block_index = {block % grid.x, block / grid.x, 0};
      poison(shared);
      run_block();
      for (size_t at = shared_bytes; at < shared_limit; ++at) {
        if (shared[at] != static_cast<char>(kPoisonByte)) fail("written behind the shared memory");
      }
    }
  }

  // What each lane of the warp brings to the same instruction.
  template <typename T>
  const std::array<T, kLanes>& exchange(const char* what, const T& value) {
    static_assert(sizeof(T) <= 64 && std::is_trivially_copyable_v<T>);
    Warp& warp = warps_[current_ / kLanes];
    std::byte* values = warp.values[warp.meeting.count % 2];
    std::memcpy(values + current_ % kLanes * sizeof(T), &value, sizeof(T));
    meet(warp.meeting, what, kLanes);
    return *reinterpret_cast<const std::array<T, kLanes>*>(values);
  }

  // Of all threads that have not ended; whether any brings true.
  bool meet_block(bool value) {
    bool& any = any_[block_.count % 2];
    any = value || (block_.arrived > 0 && any);
    meet(block_, "__syncthreads", live_);
    return any;
  }

  void defer(const Copy& copy) {
    if ((reinterpret_cast<uintptr_t>(copy.to) | reinterpret_cast<uintptr_t>(copy.from)) %
        copy.size) {
      fail("a copy of misaligned addresses");
    }
    threads_[current_].open.push_back(copy);
  }
  void commit() { threads_[current_].groups.push_back(std::exchange(threads_[current_].open, {})); }
  // Copies happen no earlier than they must.
  void wait(size_t pending) {
    auto& groups = threads_[current_].groups;
    while (groups.size() > pending) {
      for (const Copy& copy : groups.front()) {
        std::memset(copy.to, 0, copy.size);
        if (copy.bytes) std::memcpy(copy.to, copy.from, copy.bytes);
      }
      groups.erase(groups.begin());
    }
  }

  [[noreturn]] void fail(const char* why) const {
    std::fprintf(stderr, "block %u, %u thread %d: %s\n", block_index.x, block_index.y, current_,
                 why);
    std::abort();
  }

 private:
  void meet(Meeting& meeting, const char* what, int expected) {
    if (meeting.arrived > 0 && std::strcmp(meeting.what, what) != 0) fail("a warp has diverged");
    meeting.what = what;
    if (++meeting.arrived == expected) return release(meeting);
    Thread& thread = threads_[current_];
    thread.waits_at = &meeting;
    thread.waits_beyond = meeting.count;
    if (_setjmp(thread.resume) == 0) _longjmp(scheduler_, 1);
  }
  static void release(Meeting& meeting) {
    meeting.arrived = 0;
    ++meeting.count;
  }

  void run_block() {
    const int count = static_cast<int>(block_size.x);
    live_ = count;
    block_ = {};
    for (Warp& warp : warps_) warp.meeting = {};
    for (int i = 0; i < count; ++i) prepare(i);
    while (live_ > 0) {
      bool moved = false;
      for (int warp = 0; warp < count / kLanes; ++warp) {
        while (run_warp(descending_ ? count / kLanes - 1 - warp : warp)) moved = true;
      }
      if (!moved)
        fail(block_.arrived > 0 ? "some threads never come to __syncthreads"
                                : "some lanes never come to their warp's instruction");
    }
  }

  // Every lane that can, up to where it must wait; false: none can.
  bool run_warp(int warp) {
    bool moved = false;
    for (int i = 0; i < kLanes; ++i) {
      const int index = warp * kLanes + (descending_ ? kLanes - 1 - i : i);
      const Thread& thread = threads_[index];
      if (thread.done || (thread.waits_at && thread.waits_at->count == thread.waits_beyond))
        continue;
      resume(index);
      moved = true;
    }
    return moved;
  }

  void prepare(int index) {
    Thread& thread = threads_[index];
    thread.waits_at = nullptr;
    thread.begun = thread.done = false;
    thread.groups.clear();
    thread.open.clear();
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = &stacks_[static_cast<size_t>(index) * kStackBytes];
    thread.start.uc_stack.ss_size = kStackBytes;
    makecontext(&thread.start, &Machine::begin, 0);
  }

  void resume(int index) {
    current_ = index;
    thread_index.x = static_cast<uint32_t>(index);
    Thread& thread = threads_[index];
    if (_setjmp(scheduler_) != 0) return;
    if (thread.begun) _longjmp(thread.resume, 1);
    thread.begun = true;
    setcontext(&thread.start);
  }

  static void begin();

  // All thread-local memory of this module, which is what stands for shared memory, static too.
  static void poison(const char* inside) {
    const auto visit = [](dl_phdr_info* module, size_t, void* address) {
      for (int i = 0; i < module->dlpi_phnum; ++i) {
        const auto& segment = module->dlpi_phdr[i];
        auto* begin = static_cast<char*>(module->dlpi_tls_data);
        if (segment.p_type != PT_TLS || !begin || address < begin ||
            address >= begin + segment.p_memsz) {
          continue;
        }
        std::memset(begin, kPoisonByte, segment.p_memsz);
        return 1;
      }
      return 0;
    };
    if (!dl_iterate_phdr(visit, const_cast<char*>(inside))) std::abort();
  }

  std::unique_ptr<std::byte[]> stacks_{new std::byte[kMaxThreads * kStackBytes]};
  std::vector<Thread> threads_ = std::vector<Thread>(kMaxThreads);
  std::array<Warp, kMaxThreads / kLanes> warps_;
  Meeting block_;
  bool any_[2] = {};
  int live_ = 0;
  int current_ = 0;
  bool descending_ = false;
  jmp_buf scheduler_;
  std::function<void()> body_;
};

inline Machine machine;

// Never returns: the stack ends here.
inline void Machine::begin() {
  machine.body_();
  machine.threads_[machine.current_].done = true;
  if (--machine.live_ > 0 && machine.block_.arrived == machine.live_) release(machine.block_);
  _longjmp(machine.scheduler_, 1);
}

}  // namespace fovea::emulation
