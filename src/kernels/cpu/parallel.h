// SPDX-License-Identifier: Apache-2.0
// Loops over independent items on a ThreadPool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "fovea/thread_pool.h"

namespace fovea::kernels::cpu {

// Calls body(begin, end) for ranges that together cover [0, items). Each range but the last has at
// least `grain` items, so that small work stays on the calling thread. Allocates nothing.
template <typename Body>
void parallel_ranges(ThreadPool& threads, int64_t items, int64_t grain, const Body& body) {
  if (items <= 0) return;
  // Four ranges per thread balance the load when other processes take some of the cores' time.
  const int64_t even = (items + threads.size() * 4 - 1) / (threads.size() * 4);
  const int64_t step = std::max({grain, even, int64_t{1}});
  const auto task = [&](int64_t index, int) {
    body(index * step, std::min(items, (index + 1) * step));
  };
  threads.parallel_for((items + step - 1) / step, task);
}

}  // namespace fovea::kernels::cpu
