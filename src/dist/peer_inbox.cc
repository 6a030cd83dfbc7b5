// SPDX-License-Identifier: Apache-2.0
#include "dist/peer_inbox.h"

#include <fmt/format.h>

#include <atomic>

#include "core/check.h"

namespace fovea {

namespace cuda = kernels::cuda;

PeerInbox::PeerInbox(int gpu, int rank, int ranks, int64_t max_words) : context_(gpu) {
  context_.bind();
  memory_ =
      gpu::DeviceBuffer(static_cast<size_t>(cuda::kBoxes * ranks * max_words) * sizeof(uint32_t));
  counters_ = gpu::DeviceBuffer(sizeof(cuda::BoxCounters));
  stop_ = gpu::PinnedBuffer(sizeof(uint32_t));
  gpu::fill_bytes(memory_.data(), 0xff, memory_.bytes(), nullptr);  // kNotArrived
  gpu::fill_bytes(counters_.data(), 0, counters_.bytes(), nullptr);
  gpu::synchronize(nullptr);
  *stop_.data<uint32_t>() = 0;
  boxes_.from = memory_.data<uint32_t>();
  boxes_.box_stride = ranks * max_words;
  boxes_.part_stride = max_words;
  boxes_.counters = counters_.data<cuda::BoxCounters>();
  boxes_.stop = stop_.data<uint32_t>();
  boxes_.rank = rank;
  boxes_.ranks = ranks;
  boxes_.sends = boxes_.receives = 1;
}

void PeerInbox::stop() { std::atomic_ref(*boxes_.stop).store(1); }

void PeerInbox::check() const {
  if (std::atomic_ref(*boxes_.stop).load() == 0) return;
  fail(ErrorCode::device_failure, "rank {} has stopped waiting for the others", boxes_.rank);
}

std::string why_no_peers(std::span<const int> gpus) {
  if (gpus.size() > cuda::kMaxBoxRanks) {
    return fmt::format("there are {} ranks, at most {} write into each other's memory", gpus.size(),
                       cuda::kMaxBoxRanks);
  }
  for (const int from : gpus) {
    for (const int to : gpus) {
      if (from == to || gpu::Context(from).can_access(gpu::Context(to))) continue;
      return fmt::format("GPU {} cannot access the memory of GPU {}", from, to);
    }
  }
  return {};
}

std::vector<std::unique_ptr<PeerInbox>> make_peer_inboxes(std::span<const int> gpus,
                                                          int64_t max_words,
                                                          std::chrono::milliseconds timeout) {
  if (const std::string why = why_no_peers(gpus); !why.empty()) {
    fail(ErrorCode::unsupported, "{}", why);
  }
  std::vector<std::unique_ptr<PeerInbox>> ranks;
  for (const int gpu : gpus) {
    const auto rank = static_cast<int>(ranks.size());
    ranks.emplace_back(new PeerInbox(gpu, rank, static_cast<int>(gpus.size()), max_words));
    ranks.back()->boxes_.timeout_ns = std::chrono::nanoseconds(timeout).count();
  }
  for (const auto& rank : ranks) {
    for (size_t other = 0; other < ranks.size(); ++other) {
      const PeerInbox& there = *ranks[other];
      const bool same = there.context_.info().index == rank->context_.info().index;
      if (!same) rank->context_.allow_access_to(there.context_);
      rank->boxes_.to[other] = there.boxes_.from + rank->boxes_.rank * max_words;
    }
  }
  return ranks;
}

namespace {

// Opens the inboxes of all other ranks. Returns their addresses, this rank's own among them.
std::vector<uint32_t*> open_inboxes(Communicator& processes, const gpu::DeviceBuffer& own,
                                    std::vector<gpu::OpenedMemory>& opened) {
  std::vector<uint32_t*> inboxes;
  std::vector<gpu::CUipcMemHandle> names(static_cast<size_t>(processes.size()));
  std::string problem;
  gpu::CUipcMemHandle name{};
  try {
    name = gpu::name_of(own);
  } catch (const Error& error) {
    problem = error.what();
  }
  processes.all_gather(&name, names.data(), sizeof(name));
  try {
    for (int rank = 0; rank < processes.size() && problem.empty(); ++rank) {
      const bool is_own = rank == processes.rank();
      if (!is_own) opened.emplace_back(names[static_cast<size_t>(rank)]);
      inboxes.push_back(is_own ? own.data<uint32_t>() : opened.back().data<uint32_t>());
    }
  } catch (const Error& error) {
    problem = error.what();
  }
  int32_t failed = problem.empty() ? 0 : 1;
  processes.all_reduce(&failed, &failed, 1, DType::i32, ReduceOp::max);
  if (failed != 0) {
    opened.clear();  // an earlier inbox's, too: all or none are used
    processes.barrier();
    fail(ErrorCode::unsupported, "{}",
         problem.empty() ? "another rank cannot access the memory of all GPUs" : problem);
  }
  return inboxes;
}

}  // namespace

std::unique_ptr<PeerInbox> make_process_inbox(Communicator& processes, int gpu, int64_t max_words,
                                              std::chrono::milliseconds timeout,
                                              std::vector<gpu::OpenedMemory>& opened) {
  if (processes.size() > cuda::kMaxBoxRanks) {
    fail(ErrorCode::unsupported, "there are {} ranks, at most {} write into each other's memory",
         processes.size(), cuda::kMaxBoxRanks);
  }
  std::unique_ptr<PeerInbox> inbox(
      new PeerInbox(gpu, processes.rank(), processes.size(), max_words));
  inbox->boxes_.timeout_ns = std::chrono::nanoseconds(timeout).count();
  const std::vector<uint32_t*> inboxes = open_inboxes(processes, inbox->memory_, opened);
  for (size_t rank = 0; rank < inboxes.size(); ++rank) {
    inbox->boxes_.to[rank] = inboxes[rank] + inbox->boxes_.rank * max_words;
  }
  return inbox;
}

}  // namespace fovea
