// SPDX-License-Identifier: Apache-2.0
#include "engine/pass_clock.h"

#include <cstdint>

namespace fovea {

void PassClock::start(Stream stream) {
  start_.record(stream);
  start_.wait();
  last_end_ = std::chrono::steady_clock::now();
  last_event_ = &start_;
}

// Adds up the times between events, because their clock is not the host's.
PassTimes PassClock::next(const gpu::Event& begin, const gpu::Event& end) {
  const auto after = [](std::chrono::steady_clock::time_point time, float milliseconds) {
    return time + std::chrono::nanoseconds(static_cast<int64_t>(1e6 * milliseconds));
  };
  PassTimes times;
  times.begin = after(last_end_, begin.milliseconds_since(*last_event_));
  times.end = after(times.begin, end.milliseconds_since(begin));
  last_end_ = times.end;
  last_event_ = &end;
  return times;
}

}  // namespace fovea
