// SPDX-License-Identifier: Apache-2.0
#include "engine/rank_orders.h"

#include <chrono>

#include "core/check.h"

namespace fovea {
namespace {

struct Head {
  RankOrder order = RankOrder::wait;
  uint32_t unused = 0;
  uint64_t value = 0, bytes = 0;
};

}  // namespace

void send_order(Communicator& ranks, RankOrder order, uint64_t value, std::span<const char> bytes) {
  Head head{order, 0, value, bytes.size()};
  ranks.broadcast(&head, sizeof(head), 0);
  if (bytes.empty()) return;
  std::vector<char> copy(bytes.begin(), bytes.end());
  ranks.broadcast(copy.data(), copy.size(), 0);
}

RankMessage receive_order(Communicator& ranks) {
  Head head;
  ranks.broadcast(&head, sizeof(head), 0);
  RankMessage message{head.order, head.value, std::vector<char>(head.bytes)};
  if (head.bytes > 0) ranks.broadcast(message.bytes.data(), message.bytes.size(), 0);
  return message;
}

uint64_t digest_of(std::span<const TokenEvent> events) {
  uint64_t digest = 0xcbf29ce484222325;  // FNV-1a
  const auto add = [&](uint64_t value) { digest = (digest ^ value) * 0x100000001b3; };
  for (const TokenEvent& event : events) {
    add(static_cast<uint64_t>(event.request));
    add(static_cast<uint64_t>(event.token));
    add(static_cast<uint64_t>(event.finish));
  }
  return digest;
}

Heartbeat::Heartbeat(Communicator& ranks) : ranks_(ranks), thread_([this] { run(); }) {}

Heartbeat::~Heartbeat() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_one();
  thread_.join();
}

void Heartbeat::run() {
  constexpr std::chrono::seconds kInterval{1};
  std::unique_lock lock(mutex_);
  while (!stop_.wait_for(lock, kInterval, [&] { return stopping_; })) {
    try {
      ranks_.check();
      send_order(ranks_, RankOrder::wait);
    } catch (const Error&) {
      return;  // the communicator keeps the reason for all later calls
    }
  }
}

}  // namespace fovea
