// SPDX-License-Identifier: Apache-2.0
// Ranks on several GPUs: collectives over NCCL, and sums by writes into each other's memory.
// Skipped where there are fewer than two GPUs; two ranks of sums run on one GPU, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "dist/collective_checks.h"
#include "dist/rank_sums.h"
#include "dist/run_ranks.h"
#include "fovea/nccl_communicator.h"
#include "gpu/several_gpus.h"
#include "support/device_array.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_error;
using test::to_device;
using test::to_host;

// Checks of host arrays over a communicator of GPUs, whose calls it enqueues or captures. Nothing
// is allocated or freed while another rank may wait for this one, because the driver may wait for
// all GPUs then.
class OnDevice final : public Communicator {
 public:
  OnDevice(Communicator& ranks, Communicator& host, int gpu, bool captures)
      : Communicator(ranks.rank(), ranks.size()),
        ranks_(ranks),
        host_(host),
        context_(gpu),
        memory_(kBytes),
        captures_(captures) {}
  ~OnDevice() override {
    context_.bind_to_free();
    try {
      host_.barrier();
    } catch (const Error&) {  // the other rank has failed, which the test reports
    }
  }
  std::string_view name() const override { return "on a GPU"; }
  void abort(std::string_view reason) override { ranks_.abort(reason); }
  void check() override { ranks_.check(); }

 protected:
  void run_all_reduce(const Reduction& call, Stream) override {
    const size_t bytes = bytes_of(call);
    run({call.send, bytes}, {call.receive, bytes}, [&](void* send, void* receive, Stream stream) {
      ranks_.all_reduce(send, receive, call.count, call.dtype, call.op, stream);
    });
  }
  void run_reduce_scatter(const Reduction& call, Stream) override {
    const size_t bytes = bytes_of(call);
    run({call.send, bytes * all()}, {call.receive, bytes},
        [&](void* send, void* receive, Stream stream) {
          ranks_.reduce_scatter(send, receive, call.count, call.dtype, call.op, stream);
        });
  }
  void run_all_gather(const Exchange& call, Stream) override {
    run({call.send, call.bytes}, {call.receive, call.bytes * all()},
        [&](void* send, void* receive, Stream stream) {
          ranks_.all_gather(send, receive, call.bytes, stream);
        });
  }
  void run_all_to_all(const Exchange& call, Stream) override {
    run({call.send, call.bytes * all()}, {call.receive, call.bytes * all()},
        [&](void* send, void* receive, Stream stream) {
          ranks_.all_to_all(send, receive, call.bytes, stream);
        });
  }
  void run_broadcast(void* data, size_t bytes, int root, Stream) override {
    run({data, bytes}, {data, bytes}, [&](void*, void* receive, Stream stream) {
      ranks_.broadcast(receive, bytes, root, stream);
    });
  }
  void run_barrier(Stream) override {
    context_.bind();
    ranks_.barrier(stream_.get());
    gpu::synchronize(stream_.get());
  }

 private:
  static constexpr size_t kBytes = 1 << 20;
  struct HostArray {
    const void* data = nullptr;
    size_t bytes = 0;
    const char* begin() const { return static_cast<const char*>(data); }
    const char* end() const { return begin() + bytes; }
  };
  static size_t bytes_of(const Reduction& call) {
    return static_cast<size_t>(call.count) * dtype_bytes(call.dtype);
  }
  size_t all() const { return static_cast<size_t>(size()); }
  char* upload(const HostArray& array, size_t at) const {
    char* const to = memory_.data<char>() + at;
    gpu::copy_to_device(to, array.data, array.bytes, stream_.get());
    return to;
  }

  // Arrays that overlap do so on the device, too.
  template <typename Call>
  void run(const HostArray& send, const HostArray& receive, const Call& call) {
    context_.bind();
    char *from = nullptr, *to = nullptr;
    if (send.end() <= receive.begin() || receive.end() <= send.begin()) {
      from = upload(send, 0);
      to = upload(receive, kBytes / 2);
    } else {
      const char* const begin = std::min(send.begin(), receive.begin());
      const char* const end = std::max(send.end(), receive.end());
      char* const both = upload({begin, static_cast<size_t>(end - begin)}, 0);
      from = both + (send.begin() - begin);
      to = both + (receive.begin() - begin);
    }
    const auto enqueue = [&](Stream stream) { call(from, to, stream); };
    if (captures_) graphs_.push_back(gpu::Graph::capture(stream_.get(), enqueue));
    host_.barrier();
    if (captures_) {
      graphs_.back().launch(stream_.get());
    } else {
      enqueue(stream_.get());
    }
    gpu::copy_to_host(const_cast<void*>(receive.data), to, receive.bytes, stream_.get());
    gpu::synchronize(stream_.get());
  }

  Communicator &ranks_, &host_;
  gpu::Context context_;
  gpu::OwnedStream stream_;
  gpu::DeviceBuffer memory_;
  std::vector<gpu::Graph> graphs_;
  bool captures_;
};

class NcclRanks : public testing::TestWithParam<bool> {};

TEST_P(NcclRanks, PassAllChecks) {
  FOVEA_NEEDS_GPUS(2);
  const NcclId id = make_nccl_id();
  test::run_all_ranks(2, [&](Communicator& host) {
    const int rank = host.rank();
    const gpu::Context context(rank);
    const auto ranks = make_nccl_communicator(id, rank, 2, {DeviceKind::cuda, rank});
    // Calls run once before they are captured, because NCCL connects the ranks then.
    OnDevice first(*ranks, host, rank, false);
    test::check_reductions(first, DType::f32, ReduceOp::sum, 4);
    test::check_exchanges(first, 4);
    OnDevice checked(*ranks, host, rank, GetParam());
    for (const int64_t count : {0, 1, 513}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::i32, DType::i64}) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::max}) {
          test::check_reductions(checked, dtype, op, count);
        }
      }
      test::check_exchanges(checked, count);
    }
    ranks->check();
  });
}

INSTANTIATE_TEST_SUITE_P(Enqueued, NcclRanks, testing::Values(false));
INSTANTIATE_TEST_SUITE_P(Captured, NcclRanks, testing::Values(true));

// Sums whose kernels run at the same time on these GPUs.
class ConcurrentSums : public testing::TestWithParam<std::vector<int>> {
 protected:
  void SetUp() override {
    FOVEA_NEEDS_GPUS(1 + *std::ranges::max_element(GetParam()));
    const std::string why = why_no_peers(GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

TEST_P(ConcurrentSums, AreThoseOfAllRanksInAnyOrderOfReplays) {
  const std::vector<int>& gpus = GetParam();
  const auto ranks = make_rank_sums(gpus);
  const size_t size = ranks.size();
  // A graph of several sums of other sizes, so that both boxes of an inbox are used in any order.
  const std::vector<int64_t> counts = {4, 4096, 262144, 512, 8192};
  constexpr int kReplays = 50;
  // Ranks of one GPU share its context: one that waits for room in its queue would keep the other
  // from enqueueing what the first one's kernels wait for.
  constexpr int kQueued = 5;
  std::vector<std::vector<std::vector<float>>> results(size);
  std::atomic<size_t> ready = 0;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const gpu::Context context(gpus[rank]);
      const gpu::OwnedStream stream;
      std::vector<gpu::DeviceBuffer> send, receive;
      for (const int64_t count : counts) {
        std::vector<float> values(static_cast<size_t>(count));
        for (int64_t i = 0; i < count; ++i) {
          values[static_cast<size_t>(i)] = test::rank_value(static_cast<int>(rank), i);
        }
        send.push_back(to_device(values));
        receive.push_back(to_device(std::vector<float>(values.size(), -1)));
      }
      gpu::synchronize(nullptr);
      const gpu::Graph graph = gpu::Graph::capture(stream.get(), [&](Stream captured) {
        for (size_t i = 0; i < counts.size(); ++i) {
          EXPECT_TRUE(ranks[rank]->all_reduce(send[i].data<float>(), receive[i].data<float>(),
                                              counts[i], captured));
        }
      });
      ++ready;
      while (ready < size) std::this_thread::yield();
      for (int replay = 0; replay < kReplays; ++replay) {
        graph.launch(stream.get());
        if (replay % kQueued == kQueued - 1) gpu::synchronize(stream.get());
      }
      gpu::synchronize(stream.get());
      for (size_t i = 0; i < counts.size(); ++i) {
        results[rank].push_back(to_host<float>(receive[i], static_cast<size_t>(counts[i])));
      }
      ++ready;
      while (ready < 2 * size) std::this_thread::yield();  // nobody frees while others run
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t rank = 0; rank < size; ++rank) {
    ranks[rank]->check();
    for (size_t i = 0; i < counts.size(); ++i) {
      for (int64_t j = 0; j < counts[i]; ++j) {
        ASSERT_EQ(results[rank][i][static_cast<size_t>(j)],
                  test::expected_value(static_cast<int>(size), j, ReduceOp::sum))
            << "rank " << rank << ", sum " << i << ", value " << j;
      }
    }
  }
}

TEST_P(ConcurrentSums, ARankThatDoesNotComeIsAnErrorInTime) {
  const std::vector<int>& gpus = GetParam();
  const auto ranks = make_rank_sums(gpus, {.timeout = std::chrono::milliseconds(100)});
  const gpu::Context context(gpus[0]);
  const gpu::OwnedStream stream;
  const auto values = to_device(std::vector<float>(1024, 1));
  gpu::synchronize(nullptr);
  ASSERT_TRUE(ranks[0]->all_reduce(values.data<float>(), values.data<float>(), 1024, stream.get()));
  gpu::synchronize(stream.get());
  expect_error(ErrorCode::device_failure, "rank 0 has stopped waiting", [&] { ranks[0]->check(); });
  ranks[1]->check();
}

INSTANTIATE_TEST_SUITE_P(OneGpu, ConcurrentSums, testing::Values(std::vector<int>{0, 0}));
INSTANTIATE_TEST_SUITE_P(TwoGpus, ConcurrentSums, testing::Values(std::vector<int>{0, 1}));

}  // namespace
}  // namespace fovea
