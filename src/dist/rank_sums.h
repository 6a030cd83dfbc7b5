// SPDX-License-Identifier: Apache-2.0
// Sums of a few rows over the GPUs of one process, by kernels that write into each other's memory.
// A sum of few values takes less time than NCCL's, because it crosses the link once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/gpu.h"
#include "kernels/cuda/portable/rank_sum/launch.h"

namespace fovea {

struct RankSumsOptions {
  // Values of one sum; longer ones are refused by add() and all_reduce().
  int64_t max_values = int64_t{1} << 18;
  // A kernel that has waited for another rank for as long as this gives up.
  std::chrono::milliseconds timeout{10'000};
};

// One rank. Sums are enqueued on a stream of its GPU, which must be current, also in a capture. All
// ranks must enqueue the same ones in the same order. Every rank gets the same bits.
class RankSums {
 public:
  ~RankSums();

  // Both return false, and enqueue nothing, for sums that are too long or not aligned; all ranks
  // return the same. add() does what ResidualParams describes with the sum of all ranks' branches.
  bool add(const kernels::cuda::ResidualParams& params, Stream stream);
  // receive[i] = sum over all ranks of send[i]; they may be the same array.
  bool all_reduce(const float* send, float* receive, int64_t count, Stream stream);

  // Ends kernels of this rank that wait, and those enqueued later. May be called by any thread.
  void stop();
  // Throws Error{device_failure} if a kernel of this rank has given up or stop() was called.
  void check() const;

 private:
  friend std::vector<std::unique_ptr<RankSums>> make_rank_sums(std::span<const int>,
                                                               const RankSumsOptions&);
  RankSums(int gpu, int rank, int ranks, const RankSumsOptions& options);

  gpu::Context context_;
  gpu::DeviceBuffer inbox_, counters_;
  gpu::PinnedBuffer stop_;
  kernels::cuda::RankMessages messages_;
  kernels::cuda::RankSum kernels_;
};

// Returns why these GPUs cannot sum so, or an empty string: too many, or two that cannot access
// each other's memory. A GPU may have several ranks, whose kernels then must run at the same time.
std::string why_no_rank_sums(std::span<const int> gpus);
// Returns the ranks on these GPUs, one for each. Throws Error{unsupported} with the reason, and
// Error{out_of_memory}.
std::vector<std::unique_ptr<RankSums>> make_rank_sums(std::span<const int> gpus,
                                                      const RankSumsOptions& options = {});

}  // namespace fovea
