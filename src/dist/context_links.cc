// SPDX-License-Identifier: Apache-2.0
#include "dist/context_links.h"

#include <utility>

#include "core/check.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

constexpr int64_t kWordBytes = sizeof(uint32_t);

int64_t words_of(const ContextLinksOptions& options) {
  check_argument(options.max_bytes > 0 && options.max_bytes % 16 == 0,
                 "max_bytes is {}, must be a positive multiple of 16", options.max_bytes);
  return options.max_bytes / kWordBytes;
}

}  // namespace

ContextLinks::ContextLinks(Communicator& ranks, int gpu, const ContextLinksOptions& options)
    : context_(gpu), ranks_(&ranks), max_words_(words_of(options)) {
  check_argument(ranks.device() == DeviceKind::cuda, "the communicator {} runs on the CPU",
                 ranks.name());
  if (ranks.size() > cuda::kMaxBoxRanks) {
    fail(ErrorCode::unsupported, "there are {} ranks, at most {} GPUs share a context",
         ranks.size(), cuda::kMaxBoxRanks);
  }
  context_.bind();
  memory_ = gpu::DeviceBuffer(2 * static_cast<size_t>(ranks.size()) *
                              static_cast<size_t>(max_words_ * kWordBytes));
  // Nobody waits for words that the communicator has brought, unless it has failed.
  stop_ = gpu::DeviceBuffer(sizeof(uint32_t));
  gpu::fill_bytes(stop_.data(), 0, stop_.bytes(), nullptr);
  gpu::synchronize(nullptr);
  boxes_.stop = stop_.data<uint32_t>();
  boxes_.timeout_ns = std::chrono::nanoseconds(options.timeout).count();
  boxes_.rank = ranks.rank();
  boxes_.ranks = ranks.size();
}

ContextLinks::ContextLinks(std::unique_ptr<PeerInbox> inbox)
    : context_(inbox->context().info().index),
      inbox_(std::move(inbox)),
      max_words_(inbox_->boxes().part_stride),
      boxes_(inbox_->boxes()) {}

cuda::RankBoxes ContextLinks::boxes() const {
  cuda::RankBoxes boxes = boxes_;
  if (!rehearses_) return boxes;
  boxes.sends = boxes.receives = 0;
  boxes.counters = nullptr;
  return boxes;
}

ContextLinks::Posted ContextLinks::post(int64_t words, bool has_parts) const {
  auto* const send = memory_.data<uint32_t>();
  uint32_t* const receive = send + size() * max_words_;
  Posted posted{boxes_, boxes_, send, receive};
  posted.before.sends = posted.after.receives = 1;
  for (int rank = 0; rank < size(); ++rank) {
    posted.before.to[rank] = send + (has_parts ? rank * words : 0);
  }
  posted.after.from = receive;
  posted.after.part_stride = words;
  return posted;
}

void ContextLinks::stop() {
  if (inbox_ != nullptr) inbox_->stop();
}

void ContextLinks::check() const {
  if (inbox_ != nullptr) inbox_->check();
}

std::vector<std::unique_ptr<ContextLinks>> make_context_links(std::span<const int> gpus,
                                                              const ContextLinksOptions& options) {
  std::vector<std::unique_ptr<ContextLinks>> ranks;
  for (auto& inbox : make_peer_inboxes(gpus, words_of(options), options.timeout)) {
    ranks.push_back(std::make_unique<ContextLinks>(std::move(inbox)));
  }
  return ranks;
}

}  // namespace fovea
