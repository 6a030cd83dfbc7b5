// SPDX-License-Identifier: Apache-2.0
// The calls of NCCL, by a stand-in of the library over host memory. Nothing here needs a GPU.
#include "fovea/nccl_communicator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "dist/collective_checks.h"
#include "dist/run_ranks.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_error;
using test::expect_invalid;

constexpr Device kGpu{DeviceKind::cuda, 0};

// All ranks join at the same time, because each waits for the others.
std::vector<std::unique_ptr<Communicator>> make_ranks(int count, std::vector<int32_t>& memory,
                                                      const std::string& path = FOVEA_FAKE_NCCL) {
  const NcclId id = make_nccl_id({.path = path});
  memory.resize(static_cast<size_t>(count));
  std::vector<std::unique_ptr<Communicator>> ranks(memory.size());
  test::run_all_ranks(count, [&](Communicator& host) {
    const auto rank = static_cast<size_t>(host.rank());
    ranks[rank] = make_nccl_communicator(id, host.rank(), count, kGpu,
                                         {.path = path, .barrier_memory = &memory[rank]});
  });
  return ranks;
}

void expect_all_checks_pass(const std::vector<std::unique_ptr<Communicator>>& ranks) {
  EXPECT_EQ(ranks[0]->name(), "nccl");
  EXPECT_EQ(ranks[0]->device(), DeviceKind::cuda);
  EXPECT_TRUE(ranks[0]->capturable());
  for (const auto& thrown : test::run_ranks(ranks, test::check_collectives)) {
    if (thrown) std::rethrow_exception(thrown);
  }
}

TEST(NcclCommunicator, PassesAllChecks) {
  for (const int count : {1, 3, 4}) {
    std::vector<int32_t> memory;
    expect_all_checks_pass(make_ranks(count, memory));
  }
}

// The library has no ncclCommInitRankConfig.
TEST(NcclCommunicator, PassesAllChecksOverAnOldLibrary) {
  std::vector<int32_t> memory;
  expect_all_checks_pass(make_ranks(3, memory, FOVEA_OLD_NCCL));
}

// Rank 2 has died before it joined.
TEST(NcclCommunicator, ARankThatDoesNotJoinFailsTheOthersInTime) {
  const NcclId id = make_nccl_id({.path = FOVEA_FAKE_NCCL});
  const auto begin = std::chrono::steady_clock::now();
  test::run_all_ranks(2, [&](Communicator& host) {
    int32_t memory = 0;
    const NcclOptions options{.path = FOVEA_FAKE_NCCL,
                              .barrier_memory = &memory,
                              .timeout = std::chrono::milliseconds(300)};
    expect_error(ErrorCode::device_failure,
                 {"nccl: rank " + std::to_string(host.rank()) + " of 3 has waited for 0.3 s",
                  "not all others have joined"},
                 [&] { make_nccl_communicator(id, host.rank(), 3, kGpu, options); });
  });
  const auto waited = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(waited, std::chrono::milliseconds(300));
  EXPECT_LT(waited, std::chrono::seconds(10));
}

TEST(NcclCommunicator, AnAbortIsAnErrorOfAllRanks) {
  std::vector<int32_t> memory;
  const auto ranks = make_ranks(2, memory);
  ranks[1]->abort("gone");
  expect_error(ErrorCode::device_failure, {"nccl: an enqueued call returned 6", "remote process"},
               [&] { ranks[0]->check(); });
  expect_error(ErrorCode::device_failure, "remote process", [&] { ranks[0]->barrier(); });
  expect_error(ErrorCode::device_failure, "gone", [&] { ranks[1]->barrier(); });
}

TEST(NcclCommunicator, NamesTheArgumentOrTheReason) {
  const NcclOptions fake{.path = FOVEA_FAKE_NCCL};
  const NcclId id = make_nccl_id(fake);
  expect_invalid("device is cpu, must be a GPU",
                 [&] { make_nccl_communicator(id, 0, 1, {}, fake); });
  expect_invalid("rank is 2, must be in [0, 2)",
                 [&] { make_nccl_communicator(id, 2, 2, kGpu, fake); });
  expect_invalid("timeout is 0 ms, must be positive", [&] {
    make_nccl_communicator(id, 0, 1, kGpu,
                           {.path = FOVEA_FAKE_NCCL, .timeout = std::chrono::milliseconds(0)});
  });
  expect_invalid("comm is null", [&] { wrap_nccl_communicator(nullptr, kGpu, fake); });
  int32_t memory = 0;
  for (const auto& [path, call] : {std::pair{FOVEA_FAKE_NCCL, "ncclCommInitRankConfig"},
                                   {FOVEA_OLD_NCCL, "ncclCommInitRank"}}) {
    expect_error(ErrorCode::device_failure, {call, " returned 4, invalid argument"}, [&] {
      make_nccl_communicator({}, 0, 1, kGpu, {.path = path, .barrier_memory = &memory});
    });
  }
  expect_error(ErrorCode::unsupported, "NCCL cannot be loaded",
               [] { make_nccl_id({.path = "/nowhere/libnccl.so"}); });
  expect_error(ErrorCode::unsupported, "has no ncclGetUniqueId",
               [] { make_nccl_id({.path = "libm.so.6"}); });
}

}  // namespace
}  // namespace fovea
