// SPDX-License-Identifier: Apache-2.0
#include "engine/wait_for_pass.h"

#include <chrono>

#include "core/check.h"

namespace fovea {

void wait_for_pass(ModelDevice& device, const gpu::Event& end) {
  if (device.ranks() == nullptr) return end.wait();
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kBetweenChecks{1};
  const Clock::time_point begin = Clock::now();
  try {
    for (Clock::time_point next = begin; !end.reached();) {
      const Clock::time_point now = Clock::now();
      if (now < next) continue;
      next = now + kBetweenChecks;
      device.check_ranks();
      if (now - begin < device.rank_timeout()) continue;
      fail(ErrorCode::device_failure, "the pass did not end within {} ms, other ranks may hang",
           device.rank_timeout().count());
    }
    device.check_ranks();
  } catch (const Error& error) {
    device.end_ranks(error.what());
    throw;
  }
}

}  // namespace fovea
