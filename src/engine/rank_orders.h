// SPDX-License-Identifier: Apache-2.0
// The orders that rank 0 gives to ranks in other processes. All ranks get them in one order,
// between the collectives of the model, over the same communicator.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "fovea/communicator.h"
#include "fovea/engine.h"

namespace fovea {

enum class RankOrder : uint32_t {
  wait,  // says that rank 0 is alive
  load,
  add,
  cancel,
  step,
  logits,
  clear_prefix_cache,
  unload,
  end,
};

struct RankMessage {
  RankOrder order = RankOrder::wait;
  // load: the parts that are divided in another way; cancel: the request; step: the digest of the
  // step before.
  uint64_t value = 0;
  std::vector<char> bytes = {};
};

// Sends an order to all ranks; called on rank 0.
void send_order(Communicator& ranks, RankOrder order, uint64_t value = 0,
                std::span<const char> bytes = {});
// Waits for the next one; called on all other ranks.
RankMessage receive_order(Communicator& ranks);

// Returns a number that differs if the tokens do.
uint64_t digest_of(std::span<const TokenEvent> events);

// Says every second on rank 0 that it is alive, except while somebody else holds the mutex, which
// all calls of the communicator need.
class Heartbeat {
 public:
  explicit Heartbeat(Communicator& ranks);
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  std::mutex& mutex() { return mutex_; }

 private:
  void run();

  Communicator& ranks_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace fovea
