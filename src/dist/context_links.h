// SPDX-License-Identifier: Apache-2.0
// How a GPU exchanges the queries and results of distributed contexts with other ranks: by writes
// into each other's memory, which cross the link once, or over a communicator.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "dist/peer_inbox.h"
#include "fovea/communicator.h"

namespace fovea {

struct ContextLinksOptions {
  // Bytes of a message to one rank, a multiple of 16; longer ones are sent in pieces. A rank has
  // three times this for each rank.
  int64_t max_bytes = int64_t{8} << 20;
  // A kernel that has waited for another rank for as long as this gives up.
  std::chrono::milliseconds timeout{10'000};
};

// One rank, whose exchanges share these objects. All of them are enqueued on one stream of its GPU,
// also in a capture, and all ranks enqueue the same ones in the same order.
class ContextLinks {
 public:
  // Over a communicator of this GPU, which must outlive this object.
  ContextLinks(Communicator& ranks, int gpu, const ContextLinksOptions& options = {});
  // Over the memory of other ranks.
  explicit ContextLinks(std::unique_ptr<PeerInbox> inbox);
  ~ContextLinks() { context_.bind_to_free(); }
  ContextLinks(const ContextLinks&) = delete;
  ContextLinks& operator=(const ContextLinks&) = delete;

  int rank() const { return boxes_.rank; }
  int size() const { return boxes_.ranks; }
  const gpu::Context& context() const { return context_; }
  // Null: the ranks write into each other's memory.
  Communicator* communicator() const { return ranks_; }
  int64_t max_words() const { return max_words_; }

  // Boxes in peers' memory, or those of a rank by itself while it rehearses.
  kernels::cuda::RankBoxes boxes() const;
  // Boxes of the kernels before and after a call of the communicator, whose messages to each rank
  // have this many words. Without parts, all ranks get the same message.
  struct Posted {
    kernels::cuda::RankBoxes before, after;
    void *send, *receive;
  };
  Posted post(int64_t words, bool has_parts) const;

  // While a pass is rehearsed, exchanges do not communicate.
  void rehearse(bool on) { rehearses_ = on; }
  bool rehearses() const { return rehearses_; }
  // As those of PeerInbox. A communicator has such functions itself.
  void stop();
  void check() const;

 private:
  gpu::Context context_;
  std::unique_ptr<PeerInbox> inbox_;  // null with a communicator
  Communicator* ranks_ = nullptr;
  int64_t max_words_;
  bool rehearses_ = false;
  gpu::DeviceBuffer memory_, stop_;  // messages that a communicator sends and receives
  kernels::cuda::RankBoxes boxes_{};
};

// Returns ranks that write into each other's memory, one on each of these GPUs. Errors as
// make_peer_inboxes().
std::vector<std::unique_ptr<ContextLinks>> make_context_links(
    std::span<const int> gpus, const ContextLinksOptions& options = {});

}  // namespace fovea
