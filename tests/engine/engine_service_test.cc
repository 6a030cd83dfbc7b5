// SPDX-License-Identifier: Apache-2.0
#include "fovea/engine_service.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

#include "engine/small_engine.h"
#include "engine/wrapped_engine.h"
#include "support/cases.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using namespace std::chrono_literals;

constexpr auto kLong = 60s;

// Collects the results of requests as their events arrive.
class Collector {
 public:
  ServiceRequest request(GenerateRequest request, size_t index, int32_t priority = 0) {
    return {std::move(request), priority, [this, index](TokenEvent event) {
              const std::lock_guard lock(mutex_);
              append_event(results_[index], event, false);
              if (event.finish == FinishReason::none) return;
              order_.push_back(index);
              changed_.notify_all();
            }};
  }
  void wait_for(size_t finished) {
    std::unique_lock lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, kLong, [&] { return order_.size() >= finished; }));
  }
  GenerateResult result(size_t index) {
    const std::lock_guard lock(mutex_);
    return results_[index];
  }
  std::vector<size_t> order() {
    const std::lock_guard lock(mutex_);
    return order_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<size_t, GenerateResult> results_;
  std::vector<size_t> order_;
};

// Holds up the steps of an engine until it is opened.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

std::unique_ptr<Engine> gated_engine(Gate& gate) {
  return std::make_unique<WrappedEngine>(Engine::load(small_options()), [&] { gate.pass(); });
}

std::vector<ServiceRequest> one(ServiceRequest request) {
  std::vector<ServiceRequest> list;
  list.push_back(std::move(request));
  return list;
}

void expect_empty_pools(const EngineService& service) {
  ASSERT_TRUE(service.wait_idle(kLong));
  const ServiceStats stats = service.stats();
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.engine.kv_pages_free, stats.engine.kv_pages);
}

TEST(EngineService, RequestsOfManyThreadsGetTheirOwnTokens) {
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 24; ++i)
    requests.push_back(text_request(kPrompt.substr(0, 4 + static_cast<size_t>(i)), 8));
  const auto expected = shared_engine().generate(requests);
  Collector collector;
  EngineService service(Engine::load(small_options()), {.max_running = 4});
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = t; i < requests.size(); i += 4)
        EXPECT_EQ(service.add(one(collector.request(requests[i], i))).size(), 1u);
    });
  }
  for (std::thread& thread : threads) thread.join();
  collector.wait_for(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(collector.result(i).tokens, expected[i].tokens) << i;
    EXPECT_EQ(collector.result(i).text, expected[i].text) << i;
  }
}

TEST(EngineService, RefusalsNameTheFieldAndTheRequest) {
  EngineService service(Engine::load(small_options()), {});
  Collector collector;
  std::vector<ServiceRequest> requests;
  for (size_t i = 0; i < 3; ++i) requests.push_back(collector.request(text_request(kPrompt, 4), i));
  requests[1].request.sampling.top_p = 2;
  test::expect_error(ErrorCode::invalid_argument, {"request 2 of 3", "top_p"},
                     [&] { service.add(std::move(requests)); });
  test::expect_error(ErrorCode::invalid_argument, {"priority is 3601"}, [&] {
    service.add(one(collector.request(text_request(kPrompt, 4), 0, 3601)));
  });
  expect_empty_pools(service);
}

TEST(EngineService, AFullQueueTakesAllOrNothing) {
  Gate gate;
  EngineService service(gated_engine(gate), {.max_running = 1, .max_waiting = 3});
  Collector collector;
  const auto add = [&](size_t count, size_t first) {
    std::vector<ServiceRequest> requests;
    for (size_t i = 0; i < count; ++i)
      requests.push_back(collector.request(text_request(kPrompt, 2), first + i));
    return service.add(std::move(requests)).size();
  };
  EXPECT_EQ(add(1, 0), 1u);
  while (service.stats().running == 0) std::this_thread::yield();
  EXPECT_EQ(add(2, 1), 2u);
  EXPECT_EQ(add(2, 3), 0u);
  EXPECT_EQ(add(1, 3), 1u);
  EXPECT_EQ(add(1, 4), 0u);
  EXPECT_EQ(service.stats().waiting, 3);
  gate.open();
  collector.wait_for(4);
  EXPECT_EQ(add(3, 4), 3u);
  collector.wait_for(7);
}

TEST(EngineService, PrioritiesOrderTheQueueAndAgeWins) {
  Gate gate;
  EngineService service(gated_engine(gate), {.max_running = 1});
  Collector collector;
  service.add(one(collector.request(text_request(kPrompt, 2), 0)));
  while (service.stats().running == 0) std::this_thread::yield();
  const int32_t priorities[] = {5, 0, -5, 0};
  for (size_t i = 0; i < 4; ++i)
    service.add(one(collector.request(text_request(kPrompt, 2), i + 1, priorities[i])));
  gate.open();
  collector.wait_for(5);
  EXPECT_EQ(collector.order(), (std::vector<size_t>{0, 3, 2, 4, 1}));
}

// A unit of priority is worth a second of waiting, so that later requests of a better priority do
// not pass it forever.
TEST(EngineService, AWorsePriorityWaitsNoLongerThanItIsWorth) {
  Gate gate;
  EngineService service(gated_engine(gate), {.max_running = 1});
  Collector collector;
  service.add(one(collector.request(text_request(kPrompt, 2), 0)));
  while (service.stats().running == 0) std::this_thread::yield();
  service.add(one(collector.request(text_request(kPrompt, 2), 1, 1)));
  service.add(one(collector.request(text_request(kPrompt, 2), 2)));
  std::this_thread::sleep_for(1100ms);
  service.add(one(collector.request(text_request(kPrompt, 2), 3)));
  gate.open();
  collector.wait_for(4);
  EXPECT_EQ(collector.order(), (std::vector<size_t>{0, 2, 1, 3}));
}

// Long prompts come in chunks, and every request past its prompt gets a token in each pass.
TEST(EngineService, StreamsGoOnWhilePromptsRun) {
  EngineOptions options = small_options();
  options.max_batch_tokens = 8;
  Gate gate;
  EngineService service(
      std::make_unique<WrappedEngine>(Engine::load(options), [&] { gate.pass(); }),
      {.max_running = 4});
  Collector collector;
  std::atomic<int> tokens = 0, tokens_at_the_prompts_end = -1;
  ServiceRequest stream = collector.request(text_request(kPrompt, 100), 0);
  stream.on_event = [&, inner = stream.on_event](TokenEvent event) {
    if (event.token >= 0) ++tokens;
    inner(std::move(event));
  };
  service.add(one(std::move(stream)));
  while (service.stats().running == 0) std::this_thread::yield();
  // 140 tokens take 20 passes, each of which also has the stream's token.
  GenerateRequest prompt = text_request("", 1);
  for (int32_t i = 0; i < 140; ++i) prompt.tokens.push_back(100 + i);
  ServiceRequest long_prompt = collector.request(std::move(prompt), 1);
  long_prompt.on_event = [&, inner = long_prompt.on_event](TokenEvent event) {
    if (tokens_at_the_prompts_end < 0) tokens_at_the_prompts_end = tokens.load();
    inner(std::move(event));
  };
  service.add(one(std::move(long_prompt)));
  gate.open();
  collector.wait_for(2);
  EXPECT_EQ(collector.order(), (std::vector<size_t>{1, 0}));
  EXPECT_GE(tokens_at_the_prompts_end, 18);
}

TEST(EngineService, CancelledRequestsEndAndFreeTheirPages) {
  EngineOptions options = small_options();
  options.prefix_cache = false;
  EngineService service(Engine::load(options), {.max_running = 2});
  Collector collector;
  std::vector<ServiceRequest> requests;
  for (size_t i = 0; i < 8; ++i)
    requests.push_back(collector.request(text_request(kPrompt, 200), i));
  std::vector<int64_t> ids = service.add(std::move(requests));
  ids.push_back(99);
  service.cancel(ids);
  service.cancel(ids);
  collector.wait_for(8);
  for (size_t i = 0; i < 8; ++i) EXPECT_EQ(collector.result(i).finish, FinishReason::cancelled);
  expect_empty_pools(service);
}

// Requests wait, are computed in chunks, generate or have ended when they are cancelled.
TEST(EngineService, RandomCancelsFreeEveryPage) {
  EngineOptions options = small_options();
  options.prefix_cache = false;
  options.max_batch_tokens = 16;
  EngineService service(Engine::load(options), {.max_running = 4, .max_waiting = 64});
  std::mt19937 random(5);
  std::atomic<int64_t> ends = 0, cancelled = 0;
  int64_t added = 0;
  std::vector<int64_t> alive;
  for (int i = 0; i < 250 * test::test_scale(); ++i) {
    std::vector<ServiceRequest> requests(1 + random() % 3);
    for (ServiceRequest& one : requests) {
      one.request.tokens.assign(1 + random() % 100, 9);
      one.request.sampling.max_new_tokens = 1 + static_cast<int32_t>(random() % 100);
      one.on_event = [&](const TokenEvent& event) {
        ends += event.finish != FinishReason::none;
        cancelled += event.finish == FinishReason::cancelled;
      };
    }
    const std::vector<int64_t> ids = service.add(std::move(requests));
    added += static_cast<int64_t>(ids.size());
    alive.insert(alive.end(), ids.begin(), ids.end());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 1000));
    std::shuffle(alive.begin(), alive.end(), random);
    const size_t kept = std::min<size_t>(alive.size(), random() % 10);
    service.cancel(std::span(alive).subspan(kept));
    alive.resize(kept);
  }
  service.cancel(alive);
  expect_empty_pools(service);
  EXPECT_EQ(ends, added);
  EXPECT_GT(cancelled, added / 2);
}

TEST(EngineService, APassThatFailsOnceIsComputedAgain) {
  std::atomic<int> steps = 0;
  std::atomic<int> reported = 0;
  const auto fail_third = [&] {
    if (++steps == 3) throw std::runtime_error("a cosmic ray");
  };
  const GenerateRequest request = text_request(kPrompt, 8);
  EngineService service(std::make_unique<WrappedEngine>(Engine::load(small_options()), fail_third),
                        {.on_failure = [&](const std::string&) { ++reported; }});
  Collector collector;
  service.add(one(collector.request(request, 0)));
  collector.wait_for(1);
  EXPECT_EQ(collector.result(0).tokens, shared_engine().generate({&request, 1}).front().tokens);
  EXPECT_EQ(reported, 1);
  EXPECT_TRUE(service.stats().healthy);
}

TEST(EngineService, APassThatFailsTwiceAnswersItsRequestsAndTheServiceLives) {
  std::atomic<int> failures = 2;
  const auto fail = [&] {
    if (failures > 0) {
      --failures;
      throw std::runtime_error("secret detail");
    }
  };
  EngineService service(std::make_unique<WrappedEngine>(Engine::load(small_options()), fail), {});
  Collector collector;
  std::vector<ServiceRequest> requests;
  for (size_t i = 0; i < 3; ++i) requests.push_back(collector.request(text_request(kPrompt, 8), i));
  service.add(std::move(requests));
  collector.wait_for(3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(collector.result(i).finish, FinishReason::failed);
    EXPECT_NE(collector.result(i).error, "");
    EXPECT_EQ(collector.result(i).error.find("secret"), std::string::npos);
  }
  ASSERT_TRUE(service.wait_idle(kLong));
  EXPECT_FALSE(service.stats().healthy);
  EXPECT_EQ(service.stats().failed_passes, 2);
  const GenerateRequest request = text_request(kPrompt, 8);
  service.add(one(collector.request(request, 3)));
  collector.wait_for(4);
  EXPECT_EQ(collector.result(3).tokens, shared_engine().generate({&request, 1}).front().tokens);
  EXPECT_TRUE(service.stats().healthy);
}

TEST(EngineService, ItsEndCancelsEverything) {
  Gate gate;
  Collector collector;
  {
    EngineService service(gated_engine(gate), {.max_running = 2});
    std::vector<ServiceRequest> requests;
    for (size_t i = 0; i < 5; ++i)
      requests.push_back(collector.request(text_request(kPrompt, 200), i));
    service.add(std::move(requests));
    gate.open();
  }
  collector.wait_for(5);
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(collector.result(i).finish, FinishReason::cancelled);
}

TEST(EngineService, DrainingRefusesNewRequestsAndFinishesOldOnes) {
  Gate gate;
  EngineService service(gated_engine(gate), {});
  Collector collector;
  service.add(one(collector.request(text_request(kPrompt, 6), 0)));
  service.drain();
  EXPECT_TRUE(service.draining());
  EXPECT_TRUE(service.add(one(collector.request(text_request(kPrompt, 6), 1))).empty());
  EXPECT_FALSE(service.wait_idle(1ms));
  gate.open();
  EXPECT_TRUE(service.wait_idle(kLong));
  EXPECT_EQ(collector.result(0).tokens.size(), 6u);
}

TEST(EngineService, OtherSaltsShareNoPrefix) {
  EngineService service(Engine::load(small_options()), {});
  Collector collector;
  const auto cached = [&](size_t index, const std::string& salt) {
    GenerateRequest request = text_request(kPrompt + kPrompt + kPrompt, 2);
    request.salt = salt;
    service.add(one(collector.request(request, index)));
    collector.wait_for(index + 1);
    return collector.result(index).cached_tokens;
  };
  EXPECT_EQ(cached(0, "a"), 0);
  EXPECT_EQ(cached(1, "b"), 0);
  EXPECT_EQ(cached(2, ""), 0);
  EXPECT_GT(cached(3, "a"), 0);
  service.clear_prefix_cache();
  EXPECT_EQ(cached(4, "a"), 0);
}

}  // namespace
}  // namespace fovea
