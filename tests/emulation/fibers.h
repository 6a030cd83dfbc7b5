// SPDX-License-Identifier: Apache-2.0
// The threads of a block, each with a stack of its own. A thread runs until it waits; the scheduler
// of its block then continues with the others.
#pragma once

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <cstdlib>

#include "emulation/here.h"

namespace fovea::emulation {

constexpr size_t kStackBytes = 128 << 10;

// The condition for a thread to run again.
struct Wait {
  const char* what = nullptr;  // null: the thread can run
  bool (*is_over)(const void*) = nullptr;
  const void* with = nullptr;
  bool spins = false;  // rereads memory in a loop
  int barrier = -1;    // offset of an mbarrier
  uint32_t parity = 0;

  bool holds() const { return what && !is_over(with); }
};

class Fiber {
 public:
  Wait wait;

  void prepare(std::byte* stack, void (*entry)()) {
    wait = {};
    begun_ = false;
    getcontext(&start_);
    start_.uc_stack.ss_sp = stack;
    start_.uc_stack.ss_size = kStackBytes;
    makecontext(&start_, entry, 0);
  }
  // Runs the thread until it calls leave().
  void enter(jmp_buf& scheduler) {
    if (_setjmp(scheduler) != 0) return;
    if (begun_) _longjmp(resume_, 1);
    begun_ = true;
    setcontext(&start_);
  }
  void leave(jmp_buf& scheduler) {
    if (_setjmp(resume_) == 0) _longjmp(scheduler, 1);
  }

 private:
  ucontext_t start_;
  jmp_buf resume_;
  bool begun_ = false;
};

// The stacks of all threads of a block. Pages that no thread reaches take no memory.
class Stacks {
 public:
  Stacks() {
    void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    memory_ = static_cast<std::byte*>(memory);
  }
  ~Stacks() { munmap(memory_, kMaxThreads * kStackBytes); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  std::byte* of(int thread) const { return memory_ + static_cast<size_t>(thread) * kStackBytes; }

 private:
  std::byte* memory_;
};

}  // namespace fovea::emulation
