// SPDX-License-Identifier: Apache-2.0
#include "dist/context_links.h"

#include <atomic>

#include "core/check.h"
#include "dist/rank_sums.h"

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

ContextLinks::ContextLinks(int gpu, int rank, int ranks, const ContextLinksOptions& options)
    : context_(gpu), max_words_(words_of(options)) {
  context_.bind();
  boxes_.timeout_ns = std::chrono::nanoseconds(options.timeout).count();
  boxes_.part_stride = max_words_;
  boxes_.rank = rank;
  boxes_.ranks = ranks;
}

ContextLinks::ContextLinks(Communicator& ranks, int gpu, const ContextLinksOptions& options)
    : ContextLinks(gpu, ranks.rank(), ranks.size(), options) {
  check_argument(ranks.device() == DeviceKind::cuda, "the communicator {} runs on the CPU",
                 ranks.name());
  if (ranks.size() > cuda::kMaxSumRanks) {
    fail(ErrorCode::unsupported, "there are {} ranks, at most {} GPUs share a context",
         ranks.size(), cuda::kMaxSumRanks);
  }
  ranks_ = &ranks;
  memory_ = gpu::DeviceBuffer(2 * static_cast<size_t>(ranks.size()) *
                              static_cast<size_t>(max_words_ * kWordBytes));
  // Nobody waits for words that the communicator has brought, unless it has failed.
  counters_ = gpu::DeviceBuffer(sizeof(uint32_t));
  gpu::fill_bytes(counters_.data(), 0, counters_.bytes(), nullptr);
  gpu::synchronize(nullptr);
  boxes_.stop = counters_.data<uint32_t>();
}

ContextLinks::~ContextLinks() { context_.bind_to_free(); }

cuda::ContextBoxes ContextLinks::boxes() const {
  cuda::ContextBoxes boxes = boxes_;
  boxes.sends = boxes.receives = rehearses_ || ranks_ != nullptr ? 0 : 1;
  if (rehearses_) boxes.counters = nullptr;
  return boxes;
}

ContextLinks::Posted ContextLinks::post(int64_t words, bool has_parts) const {
  auto* const send = memory_.data<uint32_t>();
  uint32_t* const receive = send + size() * max_words_;
  Posted posted{boxes_, boxes_, send, receive};
  posted.before.sends = posted.after.receives = 1;
  posted.before.receives = posted.after.sends = 0;
  for (int rank = 0; rank < size(); ++rank) {
    posted.before.to[rank] = send + (has_parts ? rank * words : 0);
  }
  posted.after.from = receive;
  posted.after.part_stride = words;
  return posted;
}

void ContextLinks::stop() {
  if (ranks_ == nullptr) std::atomic_ref(*boxes_.stop).store(1);
}

void ContextLinks::check() const {
  if (ranks_ != nullptr || std::atomic_ref(*boxes_.stop).load() == 0) return;
  fail(ErrorCode::device_failure, "rank {} has stopped waiting for contexts of the others", rank());
}

std::vector<std::unique_ptr<ContextLinks>> make_context_links(std::span<const int> gpus,
                                                              const ContextLinksOptions& options) {
  if (const std::string why = why_no_rank_sums(gpus); !why.empty()) {
    fail(ErrorCode::unsupported, "{}", why);
  }
  std::vector<std::unique_ptr<ContextLinks>> ranks;
  for (const int gpu : gpus) {
    const auto size = static_cast<int>(gpus.size());
    ContextLinks& own =
        *ranks.emplace_back(new ContextLinks(gpu, static_cast<int>(ranks.size()), size, options));
    own.memory_ = gpu::DeviceBuffer(static_cast<size_t>(cuda::kBoxes) * gpus.size() *
                                    static_cast<size_t>(own.max_words_ * kWordBytes));
    own.counters_ = gpu::DeviceBuffer(sizeof(cuda::BoxCounters));
    own.stop_ = gpu::PinnedBuffer(sizeof(uint32_t));
    *own.stop_.data<uint32_t>() = 0;
    own.boxes_.stop = own.stop_.data<uint32_t>();
    gpu::fill_bytes(own.memory_.data(), 0xff, own.memory_.bytes(), nullptr);  // kNotArrived
    gpu::fill_bytes(own.counters_.data(), 0, own.counters_.bytes(), nullptr);
    gpu::synchronize(nullptr);
    own.boxes_.from = own.memory_.data<uint32_t>();
    own.boxes_.box_stride = size * own.max_words_;
    own.boxes_.counters = own.counters_.data<cuda::BoxCounters>();
  }
  for (const auto& rank : ranks) {
    for (size_t other = 0; other < ranks.size(); ++other) {
      const ContextLinks& there = *ranks[other];
      const bool same = there.context_.info().index == rank->context_.info().index;
      if (!same) rank->context_.allow_access_to(there.context_);
      rank->boxes_.to[other] = there.boxes_.from + rank->rank() * rank->max_words_;
    }
  }
  return ranks;
}

}  // namespace fovea
