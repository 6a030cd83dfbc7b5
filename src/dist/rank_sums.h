// SPDX-License-Identifier: Apache-2.0
// Sums over the GPUs of one machine, by kernels that write into each other's memory. A sum of few
// values takes less time than NCCL's, because it crosses the link once.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dist/peer_inbox.h"
#include "kernels/cuda/portable/rank_sum/launch.h"

namespace fovea {

struct RankSumsOptions {
  // Values of one sum, a multiple of 4; longer ones are refused by add() and all_reduce(). 0: 2^21
  // divided by the ranks, because each sends its values to all others.
  int64_t max_values = 0;
  // A kernel that has waited for another rank for as long as this gives up.
  std::chrono::milliseconds timeout{10'000};
};

// One rank. Sums are enqueued on a stream of its GPU, which must be current, also in a capture. All
// ranks must enqueue the same ones in the same order. Every rank gets the same bits.
class RankSums {
 public:
  explicit RankSums(std::unique_ptr<PeerInbox> inbox);
  ~RankSums() { inbox_->context().bind_to_free(); }

  // Both return false, and enqueue nothing, for sums that are too long or not aligned; all ranks
  // return the same. add() does what ResidualParams describes with the sum of all ranks' branches.
  bool add(const kernels::cuda::ResidualParams& params, Stream stream) {
    return add(params, inbox_->boxes(), stream);
  }
  // receive[i] = sum over all ranks of send[i]; they may be the same array.
  bool all_reduce(const float* send, float* receive, int64_t count, Stream stream);

  // A product that is enqueued before add_sent() may send the branch itself, f32 [rows, dim]
  // (SkinnyGemmParams::boxes). sends() returns false if no message has room for it.
  bool sends(int64_t rows, int64_t dim) const;
  const kernels::cuda::RankBoxes& boxes() const { return inbox_->boxes(); }
  // As add(), for a branch that such a product has sent.
  bool add_sent(const kernels::cuda::ResidualParams& params, Stream stream);

  // As those of PeerInbox.
  void stop() { inbox_->stop(); }
  void check() const { inbox_->check(); }

 private:
  bool add(const kernels::cuda::ResidualParams& params, const kernels::cuda::RankBoxes& boxes,
           Stream stream);

  std::unique_ptr<PeerInbox> inbox_;
  kernels::cuda::RankSum kernels_;
};

// Returns RankSumsOptions::max_values, or its default for this number of ranks. Throws
// Error{invalid_argument} naming it.
int64_t max_values_of(const RankSumsOptions& options, int ranks);

// Returns the ranks on these GPUs, one for each. Errors as make_peer_inboxes().
std::vector<std::unique_ptr<RankSums>> make_rank_sums(std::span<const int> gpus,
                                                      const RankSumsOptions& options = {});

}  // namespace fovea
