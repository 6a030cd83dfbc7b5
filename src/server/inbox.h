// SPDX-License-Identifier: Apache-2.0
// Hands events of requests from the engine's thread to the server's thread.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fovea/engine_service.h"

namespace fovea::server {

class Inbox;

// Wakes the receivers of a step's events together: one message to the server's thread per step.
class Mailroom {
 public:
  explicit Mailroom(boost::asio::io_context& io) : io_(io) {}
  // Wakes every inbox that has received something since the last call.
  void deliver();

 private:
  friend class Inbox;
  boost::asio::io_context& io_;
  std::mutex mutex_;  // guards the events of all inboxes, too
  std::vector<std::shared_ptr<Inbox>> filled_;
};

// The events of one answer. `put` is for the engine's thread, the rest for the server's.
class Inbox : public std::enable_shared_from_this<Inbox> {
 public:
  // The index of a choice, and its event.
  using Mail = std::pair<size_t, TokenEvent>;

  explicit Inbox(Mailroom& room);
  void put(size_t choice, TokenEvent event);
  // Waits for events. Returns none after close().
  boost::asio::awaitable<std::vector<Mail>> take();
  void close();
  bool closed() const { return closed_; }

 private:
  friend class Mailroom;
  Mailroom& room_;
  std::vector<Mail> mail_;  // guarded by the room
  boost::asio::steady_timer bell_;
  bool closed_ = false;
};

}  // namespace fovea::server
