// SPDX-License-Identifier: Apache-2.0
// Collectives of one rank, of threads and of a caller's functions: results, sums that repeat bit
// for bit, arguments, and ranks that fail, hang, leave or disagree.
#include "fovea/communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>

#include "dist/collective_checks.h"
#include "dist/run_ranks.h"
#include "fovea/error.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using test::expect_error;
using test::expect_invalid;

constexpr int kMaxRanks = 8;

std::string message(const std::exception_ptr& thrown) {
  if (!thrown) return "";
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Sleeps for a short random time, in another order for each seed, rank and call.
std::function<void(int, int64_t)> random_sleep(uint32_t seed) {
  return [seed](int rank, int64_t call) {
    std::minstd_rand random(seed * 7919u + static_cast<uint32_t>(rank) * 104729u +
                            static_cast<uint32_t>(call));
    random.discard(3);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
  };
}

TEST(SelfCommunicator, PassesAllChecks) {
  const auto self = make_self_communicator();
  EXPECT_EQ(self->name(), "self");
  test::check_collectives(*self);
}

TEST(ThreadCommunicator, PassesAllChecksWithAnyNumberOfRanks) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    test::run_all_ranks(ranks, test::check_collectives);
  }
}

TEST(ThreadCommunicator, PassesAllChecksWhenRanksAreLate) {
  for (const int ranks : {2, 3, 5}) {
    ThreadCommunicatorOptions options;
    options.arrive = random_sleep(1);
    options.copy = random_sleep(2);
    test::run_all_ranks(
        ranks,
        [](Communicator& own) {
          for (const int64_t count : {1, 513}) {
            test::check_reductions(own, DType::f32, ReduceOp::sum, count);
            test::check_exchanges(own, count);
          }
        },
        options);
  }
}

// Sums of values whose order matters: every rank and every run gets the bits of the sum in the
// order of the ranks.
TEST(ThreadCommunicator, SumsHaveTheSameBitsInEveryRun) {
  constexpr int64_t kCount = 1000;
  const auto value = [](int rank, int64_t i) {
    std::minstd_rand random(static_cast<uint32_t>(rank * 5000 + i + 1));
    random.discard(2);
    return std::ldexp(static_cast<float>(random()), static_cast<int>(random() % 40) - 50);
  };
  for (const int ranks : {3, 7}) {
    std::vector<float> expected(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      for (int rank = 0; rank < ranks; ++rank) expected[static_cast<size_t>(i)] += value(rank, i);
    }
    for (uint32_t seed = 0; seed < 5; ++seed) {
      ThreadCommunicatorOptions options;
      options.arrive = random_sleep(seed);
      test::run_all_ranks(
          ranks,
          [&](Communicator& own) {
            std::vector<float> sum(kCount);
            for (int64_t i = 0; i < kCount; ++i) sum[static_cast<size_t>(i)] = value(own.rank(), i);
            own.all_reduce(sum.data(), sum.data(), kCount, DType::f32, ReduceOp::sum);
            EXPECT_EQ(sum, expected);
          },
          options);
    }
  }
}

TEST(ThreadCommunicator, A16BitSumIsRoundedOnce) {
  test::run_all_ranks(3, [](Communicator& own) {
    // 1 + 2^-8 + 2^-8: rounded after every step, bf16 would stay at 1.
    uint16_t value = float_to_bf16(own.rank() == 0 ? 1.0f : 0x1p-8f);
    own.all_reduce(&value, &value, 1, DType::bf16, ReduceOp::sum);
    EXPECT_EQ(bf16_to_float(value), 1 + 0x1p-7f);
  });
}

TEST(ThreadCommunicator, TheMaxOfANanIsNan) {
  test::run_all_ranks(3, [](Communicator& own) {
    const float mine = own.rank() == 1 ? std::numeric_limits<float>::quiet_NaN() : 5.0f;
    float result = 0;
    own.all_reduce(&mine, &result, 1, DType::f32, ReduceOp::max);
    EXPECT_TRUE(std::isnan(result));
  });
}

// Rank 1 fails in its call number 3; all ranks learn the reason, and so do later calls.
TEST(ThreadCommunicator, ARankThatFailsFailsAll) {
  for (const bool while_copying : {false, true}) {
    ThreadCommunicatorOptions options;
    const auto faulty = [](int rank, int64_t call) {
      if (rank == 1 && call == 3) throw std::runtime_error("injected");
    };
    (while_copying ? options.copy : options.arrive) = faulty;
    const auto ranks = make_thread_communicators(4, options);
    const auto begin = steady_clock::now();
    const auto thrown = test::run_ranks(ranks, [](Communicator& own) {
      for (int call = 0; call < 10; ++call) own.barrier();
    });
    EXPECT_LT(steady_clock::now() - begin, milliseconds(5000));
    for (const auto& error : thrown) {
      EXPECT_NE(message(error).find("injected"), std::string::npos) << message(error);
    }
    for (const auto& own : ranks) {
      expect_error(ErrorCode::device_failure, "rank 1 failed: injected", [&] { own->barrier(); });
      expect_error(ErrorCode::device_failure, "injected", [&] { own->check(); });
    }
  }
}

TEST(ThreadCommunicator, ARankThatHangsIsNamedAfterTheTimeout) {
  ThreadCommunicatorOptions options;
  options.timeout = milliseconds(200);
  options.arrive = [](int rank, int64_t) {
    if (rank == 2) std::this_thread::sleep_for(milliseconds(1200));
  };
  std::vector<milliseconds> waited(4);
  const auto thrown =
      test::run_ranks(make_thread_communicators(4, options), [&](Communicator& own) {
        const auto begin = steady_clock::now();
        try {
          own.barrier();
        } catch (...) {
          waited[static_cast<size_t>(own.rank())] =
              std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin);
          throw;
        }
      });
  for (size_t rank = 0; rank < thrown.size(); ++rank) {
    EXPECT_NE(message(thrown[rank]).find("barrier: rank 2 did not come within 200 ms"),
              std::string::npos)
        << message(thrown[rank]);
    if (rank != 2) {
      EXPECT_LT(waited[rank], milliseconds(1000));
    }
  }
}

TEST(ThreadCommunicator, ARankThatLeavesFailsTheOthersAtOnce) {
  auto ranks = make_thread_communicators(3);
  const auto begin = steady_clock::now();
  const auto thrown = test::run_ranks(ranks, [&](Communicator& own) {
    if (own.rank() == 1) {
      ranks[1].reset();
    } else {
      own.barrier();
    }
  });
  EXPECT_LT(steady_clock::now() - begin, milliseconds(5000));
  for (const size_t rank : {0u, 2u}) {
    EXPECT_NE(message(thrown[rank]).find("rank 1 has left"), std::string::npos)
        << message(thrown[rank]);
  }
}

TEST(ThreadCommunicator, RanksThatDisagreeAreNamed) {
  const auto thrown = test::run_ranks(make_thread_communicators(3), [](Communicator& own) {
    std::vector<float> data(30);
    if (own.rank() == 2) {
      own.all_gather(data.data(), data.data() + 4, 16);
    } else {
      own.all_reduce(data.data(), data.data(), 4, DType::f32, ReduceOp::sum);
    }
  });
  for (const auto& error : thrown) {
    EXPECT_NE(message(error).find("rank 0 called all_reduce of 4 fp32 values, sum, rank 2 called "
                                  "all_gather of 16 bytes"),
              std::string::npos)
        << message(error);
  }
}

TEST(ThreadCommunicator, AbortEndsCallsThatWait) {
  const auto ranks = make_thread_communicators(2);
  std::thread waiting(
      [&] { expect_error(ErrorCode::device_failure, "shut down", [&] { ranks[0]->barrier(); }); });
  std::this_thread::sleep_for(milliseconds(20));
  ranks[1]->abort("shut down");
  waiting.join();
  ranks[1]->abort("a later reason");
  expect_error(ErrorCode::device_failure, "shut down", [&] { ranks[1]->check(); });
}

TEST(Communicator, NamesTheArgument) {
  const auto ranks = make_thread_communicators(3);
  Communicator& own = *ranks[1];
  float data[32] = {};
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max() / 2;
  const auto reduce = [&](const void* send, void* receive, int64_t count, DType dtype) {
    own.all_reduce(send, receive, count, dtype, ReduceOp::sum);
  };
  expect_invalid("count is -1", [&] { reduce(data, data, -1, DType::f32); });
  expect_invalid("count overflows", [&] { reduce(data, data, kHuge, DType::f32); });
  expect_invalid("dtype is fp8_e4m3", [&] { reduce(data, data, 1, DType::f8e4m3); });
  expect_invalid("dtype is uint8", [&] { reduce(data, data, 1, DType::u8); });
  expect_invalid("dtype is DType(99)", [&] { reduce(data, data, 1, DType{99}); });
  expect_invalid("send is null, must hold 8 bytes", [&] { reduce(nullptr, data, 2, DType::f32); });
  expect_invalid("receive is null", [&] { reduce(data, nullptr, 2, DType::f32); });
  expect_invalid("overlap", [&] { reduce(data, data + 1, 2, DType::f32); });
  expect_invalid("op is ReduceOp(7)",
                 [&] { own.all_reduce(data, data, 1, DType::f32, ReduceOp{7}); });
  expect_invalid("receive may only be part 1",
                 [&] { own.reduce_scatter(data, data, 4, DType::f32, ReduceOp::sum); });
  expect_invalid("send may only be part 1", [&] { own.all_gather(data, data, 16); });
  expect_invalid("send and receive overlap", [&] { own.all_to_all(data, data, 16); });
  expect_invalid("root is 3, must be in [0, 3)", [&] { own.broadcast(data, 4, 3); });
  expect_invalid("data is null", [&] { own.broadcast(nullptr, 4, 0); });
  expect_invalid("stream is", [&] { own.barrier(reinterpret_cast<Stream>(data)); });
  expect_invalid("ranks is 0", [] { make_thread_communicators(0); });
  expect_invalid("timeout is 0 ms",
                 [] { make_thread_communicators(2, {.timeout = milliseconds(0)}); });
}

// A caller's functions over another communicator.
struct Wrapped {
  std::unique_ptr<Communicator> inner;
  bool fails = false;
  std::atomic<int> aborts = 0, destroys = 0;

  CommunicatorFunctions functions() {
    CommunicatorFunctions table;
    table.name = "wrapped";
    table.rank = inner->rank();
    table.size = inner->size();
    table.context = this;
    table.all_reduce = [](void* c, const void* send, void* receive, int64_t count, DType dtype,
                          ReduceOp op, Stream stream) {
      return call(
          c, [&](Communicator& own) { own.all_reduce(send, receive, count, dtype, op, stream); });
    };
    table.reduce_scatter = [](void* c, const void* send, void* receive, int64_t count, DType dtype,
                              ReduceOp op, Stream stream) {
      return call(c, [&](Communicator& own) {
        own.reduce_scatter(send, receive, count, dtype, op, stream);
      });
    };
    table.all_gather = [](void* c, const void* send, void* receive, size_t bytes, Stream stream) {
      return call(c, [&](Communicator& own) { own.all_gather(send, receive, bytes, stream); });
    };
    table.all_to_all = [](void* c, const void* send, void* receive, size_t bytes, Stream stream) {
      return call(c, [&](Communicator& own) { own.all_to_all(send, receive, bytes, stream); });
    };
    table.broadcast = [](void* c, void* data, size_t bytes, int root, Stream stream) {
      return call(c, [&](Communicator& own) { own.broadcast(data, bytes, root, stream); });
    };
    table.barrier = [](void* c, Stream stream) {
      return call(c, [&](Communicator& own) { own.barrier(stream); });
    };
    table.abort = [](void* c) {
      ++static_cast<Wrapped*>(c)->aborts;
      static_cast<Wrapped*>(c)->inner->abort("the other table failed");
    };
    table.describe = [](void*, int error) { return error == 7 ? "no luck" : nullptr; };
    table.destroy = [](void* c) { ++static_cast<Wrapped*>(c)->destroys; };
    return table;
  }

  template <typename Call>
  static int call(void* context, const Call& body) {
    auto* const own = static_cast<Wrapped*>(context);
    if (own->fails) return 7;
    try {
      body(*own->inner);
    } catch (const Error&) {
      return 1;
    }
    return 0;
  }
};

TEST(FunctionCommunicator, PassesAllChecks) {
  auto inner = make_thread_communicators(3);
  std::vector<Wrapped> wrapped(3);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (size_t rank = 0; rank < 3; ++rank) {
    wrapped[rank].inner = std::move(inner[rank]);
    ranks.push_back(make_communicator(wrapped[rank].functions()));
  }
  for (const auto& thrown : test::run_ranks(ranks, test::check_collectives)) {
    EXPECT_EQ(message(thrown), "");
  }
  ranks.clear();
  for (const Wrapped& own : wrapped) {
    EXPECT_EQ(own.destroys, 1);
    EXPECT_EQ(own.aborts, 0);
  }
}

// Without functions for sums, the library makes them of exchanges.
TEST(FunctionCommunicator, PassesAllChecksWithExchangesOnly) {
  auto inner = make_thread_communicators(4);
  std::vector<Wrapped> wrapped(4);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (size_t rank = 0; rank < 4; ++rank) {
    wrapped[rank].inner = std::move(inner[rank]);
    CommunicatorFunctions table = wrapped[rank].functions();
    table.all_reduce = table.reduce_scatter = nullptr;
    ranks.push_back(make_communicator(table));
  }
  for (const auto& thrown : test::run_ranks(ranks, test::check_collectives)) {
    EXPECT_EQ(message(thrown), "");
  }
}

TEST(FunctionCommunicator, AnErrorAbortsAndStays) {
  Wrapped wrapped;
  wrapped.inner = make_self_communicator();
  wrapped.fails = true;
  const auto own = make_communicator(wrapped.functions());
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_error(ErrorCode::device_failure, "wrapped: barrier returned 7, no luck on rank 0",
                 [&] { own->barrier(); });
  }
  wrapped.fails = false;
  expect_error(ErrorCode::device_failure, "no luck", [&] { own->check(); });
  EXPECT_EQ(wrapped.aborts, 1);
}

TEST(FunctionCommunicator, NamesTheFunctionThatIsNull) {
  Wrapped wrapped;
  wrapped.inner = make_self_communicator();
  CommunicatorFunctions table = wrapped.functions();
  table.all_to_all = nullptr;
  expect_invalid("all_to_all is null", [&] { make_communicator(table); });
  table = wrapped.functions();
  table.rank = 1;
  expect_invalid("rank is 1, must be in [0, 1)", [&] { make_communicator(table); });
  table.rank = 0;
  table.device = DeviceKind::cuda;
  table.all_reduce = nullptr;
  expect_invalid("all_reduce is null, but not optional", [&] { make_communicator(table); });
  table = wrapped.functions();
  table.device = DeviceKind{5};
  expect_invalid("device is DeviceKind(5)", [&] { make_communicator(table); });
}

}  // namespace
}  // namespace fovea
