// SPDX-License-Identifier: Apache-2.0
#include "server/inbox.h"

#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>

namespace fovea::server {

namespace asio = boost::asio;

void Mailroom::deliver() {
  std::vector<std::shared_ptr<Inbox>> filled;
  {
    const std::lock_guard lock(mutex_);
    filled.swap(filled_);
  }
  if (filled.empty()) return;
  asio::post(io_, [filled = std::move(filled)] {
    for (const std::shared_ptr<Inbox>& inbox : filled) inbox->bell_.cancel();
  });
}

Inbox::Inbox(Mailroom& room)
    : room_(room), bell_(room.io_, asio::steady_timer::time_point::max()) {}

void Inbox::put(size_t choice, TokenEvent event) {
  const std::lock_guard lock(room_.mutex_);
  if (mail_.empty()) room_.filled_.push_back(shared_from_this());
  mail_.emplace_back(choice, std::move(event));
}

asio::awaitable<std::vector<Inbox::Mail>> Inbox::take() {
  while (!closed_) {
    std::vector<Mail> mail;
    {
      const std::lock_guard lock(room_.mutex_);
      mail.swap(mail_);
    }
    if (!mail.empty()) co_return mail;
    boost::system::error_code rung;
    co_await bell_.async_wait(asio::redirect_error(asio::use_awaitable, rung));
  }
  co_return std::vector<Mail>();
}

void Inbox::close() {
  closed_ = true;
  bell_.cancel();
}

}  // namespace fovea::server
