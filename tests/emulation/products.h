// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup (wgmma) in C++. Each of 128 threads issues its share of an instruction.
// An early product runs when the last thread has issued it. A late product runs warp by warp, when
// a thread waits for it and no other can run: by then a thread that received an operand's memory
// too early has overwritten it, and a thread that reads sums before the wait finds old ones.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>

#include "emulation/machine.h"

namespace fovea::emulation {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kLanes;

// An instruction as all threads issue it.
struct WarpgroupProduct;
struct ProductTerms {
  void (*run)(const WarpgroupProduct&, int first_warp, int end_warp);
  uint64_t a, b;  // descriptors; a is 0 if it is in registers
  bool add;
  bool operator==(const ProductTerms&) const = default;
};
// An instruction with the operands of each thread.
struct WarpgroupProduct {
  ProductTerms terms;
  int threads = 0;
  std::array<float*, kThreads> d;
  std::array<std::array<uint32_t, 4>, kThreads> a;  // registers
};

class WarpgroupProducts {
 public:
  // Returns the products of the current thread's warpgroup.
  static WarpgroupProducts& own() {
    auto& slot = machine.block().of_warpgroups[here.thread_index.x / kThreads];
    if (!slot) slot = std::make_shared<WarpgroupProducts>();
    return *static_cast<WarpgroupProducts*>(slot.get());
  }

  void issue(const ProductTerms& terms, float* d, const uint32_t* a) {
    const size_t thread = here.thread_index.x % kThreads;
    const auto place = static_cast<size_t>(issued_[thread]++ - popped_);
    if (place == products_.size()) products_.emplace_back().terms = terms;
    WarpgroupProduct& product = products_[place];
    if (product.terms != terms) machine.fail("threads of a warpgroup issue different products");
    product.d[thread] = d;
    if (a) std::copy_n(a, 4, product.a[thread].begin());
    if (++product.threads < kThreads || machine.policy().late_products) return;
    terms.run(product, 0, kWarps);
    done_.fill(issued_[thread]);
    pop();
  }

  void commit() {
    const size_t thread = here.thread_index.x % kThreads;
    const size_t group = committed_[thread]++;
    if (group == groups_.size()) groups_.push_back({issued_[thread], 0});
    if (groups_[group].end != issued_[thread])
      machine.fail("threads of a warpgroup commit different products");
    ++groups_[group].threads;
  }

  void wait(size_t pending) {
    const size_t thread = here.thread_index.x % kThreads;
    if (committed_[thread] <= pending) return;
    const size_t group = committed_[thread] - pending - 1;
    machine.wait_until("wgmma, all threads of the warpgroup",
                       [&] { return groups_[group].threads == kThreads; });
    const int64_t end = groups_[group].end;
    const size_t warp = thread / kLanes;
    if (done_[warp] >= end) return;
    if (!waits_[warp]) {
      waits_[warp] = true;
      machine.settle("wgmma.wait_group");
      run(static_cast<int>(warp), end);
      waits_[warp] = false;
    }
    machine.wait_until("wgmma, its warp", [&] { return done_[warp] >= end; });
  }

 private:
  struct Group {
    int64_t end;  // number of the product after the group
    int threads;  // threads that have committed it
  };

  void run(int warp, int64_t end) {
    int64_t& done = done_[static_cast<size_t>(warp)];
    for (; done < end; ++done) {
      const WarpgroupProduct& product = products_[static_cast<size_t>(done - popped_)];
      product.terms.run(product, warp, warp + 1);
    }
    pop();
  }
  void pop() {
    for (const int64_t done = std::ranges::min(done_); popped_ < done; ++popped_)
      products_.pop_front();
  }

  std::deque<WarpgroupProduct> products_;  // starts with number popped_
  int64_t popped_ = 0;
  std::array<int64_t, kWarps> done_{};
  std::array<bool, kWarps> waits_{};
  std::array<int64_t, kThreads> issued_{};
  std::deque<Group> groups_;  // all groups of the block
  std::array<size_t, kThreads> committed_{};
};

// Returns the offset of element `k` of the summed dimension in row (or column) `at` of an operand.
// With kColumns the other dimension runs along the rows of 128 bytes.
template <int kBytes, bool kColumns>
const void* operand_element(uint64_t descriptor, int at, int k) {
  const auto field = [&](int bit) { return static_cast<int>(descriptor >> bit & 0x3fff) << 4; };
  const int start = field(0), leading = field(16), stride = field(32);
  const bool swizzled = descriptor >> 62 == 1;
  if (!swizzled && (kColumns || descriptor >> 62 != 0))
    machine.fail("an operand's layout is not emulated");
  const int byte = k * kBytes;
  int offset = 0;
  if constexpr (kColumns) {
    offset = at / 64 * leading + k / 8 * stride + k % 8 * 128 + at % 64 * kBytes;
  } else if (swizzled) {
    offset = at / 8 * stride + at % 8 * 128 + byte;
  } else {
    offset = at / 8 * stride + byte / 16 * leading + at % 8 * 16 + byte % 16;
  }
  const int address = start + offset;
  return machine.shared_pointer(
      static_cast<uint32_t>(swizzled ? address ^ (address >> 7 & 7) << 4 : address));
}

}  // namespace fovea::emulation
