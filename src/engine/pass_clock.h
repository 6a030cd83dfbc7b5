// SPDX-License-Identifier: Apache-2.0
// When passes ran on a GPU, by the clock of the host.
#pragma once

#include <chrono>

#include "engine/model_runner.h"
#include "fovea/device.h"
#include "gpu/gpu.h"

namespace fovea {

class PassClock {
 public:
  // Waits for the stream. Call it before the first pass, and after passes that next() never gets.
  void start(Stream stream);
  // Returns the times of the pass between two events that have ended, the next one after that of
  // the last call. `end` must be recorded again only after the call for the pass that follows.
  PassTimes next(const gpu::Event& begin, const gpu::Event& end);

 private:
  std::chrono::steady_clock::time_point last_end_;
  gpu::Event start_;
  const gpu::Event* last_event_ = nullptr;
};

}  // namespace fovea
