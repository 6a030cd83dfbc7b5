// SPDX-License-Identifier: Apache-2.0
// The calls of NCCL, by a stand-in of the library over host memory. Nothing here needs a GPU.
#include "fovea/nccl_communicator.h"

#include <gtest/gtest.h>

#include <exception>
#include <thread>
#include <vector>

#include "dist/collective_checks.h"
#include "dist/run_ranks.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_error;
using test::expect_invalid;

constexpr Device kGpu{DeviceKind::cuda, 0};

std::vector<std::unique_ptr<Communicator>> make_ranks(int count, std::vector<int32_t>& memory) {
  const NcclId id = make_nccl_id({.path = FOVEA_FAKE_NCCL});
  memory.resize(static_cast<size_t>(count));
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int rank = 0; rank < count; ++rank) {
    const NcclOptions options{.path = FOVEA_FAKE_NCCL,
                              .barrier_memory = &memory[static_cast<size_t>(rank)]};
    ranks.push_back(make_nccl_communicator(id, rank, count, kGpu, options));
  }
  return ranks;
}

TEST(NcclCommunicator, PassesAllChecks) {
  for (const int count : {1, 3, 4}) {
    std::vector<int32_t> memory;
    const auto ranks = make_ranks(count, memory);
    EXPECT_EQ(ranks[0]->name(), "nccl");
    EXPECT_EQ(ranks[0]->device(), DeviceKind::cuda);
    EXPECT_TRUE(ranks[0]->capturable());
    for (const auto& thrown : test::run_ranks(ranks, test::check_collectives)) {
      if (thrown) std::rethrow_exception(thrown);
    }
  }
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
  expect_invalid("comm is null", [&] { wrap_nccl_communicator(nullptr, kGpu, fake); });
  int32_t memory = 0;
  expect_error(ErrorCode::device_failure, "ncclCommInitRank returned 4, invalid argument", [&] {
    make_nccl_communicator({}, 0, 1, kGpu, {FOVEA_FAKE_NCCL, &memory});
  });
  expect_error(ErrorCode::unsupported, "NCCL cannot be loaded",
               [] { make_nccl_id({.path = "/nowhere/libnccl.so"}); });
  expect_error(ErrorCode::unsupported, "has no ncclGetUniqueId",
               [] { make_nccl_id({.path = "libm.so.6"}); });
}

}  // namespace
}  // namespace fovea
