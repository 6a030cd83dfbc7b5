// SPDX-License-Identifier: Apache-2.0
// Runs a function on another thread while a coroutine waits for it.
#pragma once

#include <boost/asio/associated_executor.hpp>
#include <boost/asio/async_result.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace fovea::server {

// Returns the result of the function, or throws what it throws. The coroutine continues on its own
// thread.
template <typename Function>
boost::asio::awaitable<std::invoke_result_t<Function>> run_on(boost::asio::thread_pool& pool,
                                                              Function function) {
  namespace asio = boost::asio;
  using Result = std::invoke_result_t<Function>;
  struct Job {
    Function function;
    std::optional<Result> result;
    std::exception_ptr failure;
  };
  const auto job = std::make_shared<Job>(Job{std::move(function), {}, {}});
  // g++ 12 destroys some temporaries of a co_await twice, so this lambda captures references only.
  const auto start = [&pool, &job](auto handler) {
    asio::post(pool, [job, handler = std::move(handler)]() mutable {
      try {
        job->result.emplace(job->function());
      } catch (...) {
        job->failure = std::current_exception();
      }
      const auto executor = asio::get_associated_executor(handler);
      asio::post(executor, std::move(handler));
    });
  };
  co_await asio::async_initiate<const asio::use_awaitable_t<>&, void()>(start, asio::use_awaitable);
  if (job->failure) std::rethrow_exception(job->failure);
  co_return std::move(*job->result);
}

}  // namespace fovea::server
