// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU into which the other ranks, of this process or of others, write messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/communicator.h"
#include "gpu/gpu.h"
#include "kernels/cuda/common/rank_boxes.h"

namespace fovea {

// One rank. Messages are enqueued on one stream of its GPU, which must be current, also in a
// capture, and all ranks enqueue the same ones in the same order.
class PeerInbox {
 public:
  ~PeerInbox() { context_.bind_to_free(); }

  const gpu::Context& context() const { return context_; }
  // Boxes in the memory of all ranks; messages are sent and received.
  const kernels::cuda::RankBoxes& boxes() const { return boxes_; }

  // Ends kernels of this rank that wait, and those enqueued later. May be called by any thread.
  void stop();
  // Throws Error{device_failure} if a kernel of this rank has given up or stop() was called.
  void check() const;

 private:
  friend std::vector<std::unique_ptr<PeerInbox>> make_peer_inboxes(std::span<const int>, int64_t,
                                                                   std::chrono::milliseconds);
  friend std::unique_ptr<PeerInbox> make_process_inbox(Communicator&, int, int64_t,
                                                       std::chrono::milliseconds,
                                                       std::vector<gpu::OpenedMemory>&);
  PeerInbox(int gpu, int rank, int ranks, int64_t max_words);

  gpu::Context context_;
  gpu::DeviceBuffer memory_, counters_;
  gpu::PinnedBuffer stop_;
  kernels::cuda::RankBoxes boxes_{};
};

// Returns why these GPUs cannot exchange messages so, or an empty string: too many, or two that
// cannot access each other's memory. A GPU may have several ranks, whose kernels then must run at
// the same time.
std::string why_no_peers(std::span<const int> gpus);
// Returns the ranks on these GPUs, one for each, for messages of up to max_words words to each
// other rank, a multiple of 4. A kernel that has waited for another rank for as long as `timeout`
// gives up. Throws Error{unsupported} with the reason, and Error{out_of_memory}.
std::vector<std::unique_ptr<PeerInbox>> make_peer_inboxes(std::span<const int> gpus,
                                                          int64_t max_words,
                                                          std::chrono::milliseconds timeout);

// Makes the rank of this process; all processes of the communicator, which is one of the host, call
// it together, each with a GPU of its own of one machine. Adds the memory of the others to
// `opened`, which the ranks close before any of them destroys its inbox. Errors as
// make_peer_inboxes(); all ranks throw, and `opened` is empty then.
std::unique_ptr<PeerInbox> make_process_inbox(Communicator& processes, int gpu, int64_t max_words,
                                              std::chrono::milliseconds timeout,
                                              std::vector<gpu::OpenedMemory>& opened);

}  // namespace fovea
