// SPDX-License-Identifier: Apache-2.0
// The memory of all ranks of an exchange on one GPU, of which the test runs one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/common/rank_boxes.h"
#include "support/device_array.h"

namespace fovea::test {

using namespace kernels::cuda;

inline size_t index(int64_t i) { return static_cast<size_t>(i); }

// A rank as the kernels see it, with an inbox for messages of up to `capacity` words.
class Inbox {
 public:
  Inbox(int ranks, int own, int64_t capacity) : ranks_(ranks), own_(own), capacity_(capacity) {
    for (int rank = 0; rank < ranks; ++rank) {
      boxes_.push_back(to_device(std::vector<uint32_t>(words(), kNotArrived)));
    }
    counters_ = to_device(std::vector<BoxCounters>(1));
    stop_ = to_device(std::vector<uint32_t>(1, 0));
  }

  RankBoxes boxes() const {
    RankBoxes boxes{};
    for (int rank = 0; rank < ranks_; ++rank) {
      boxes.to[rank] = boxes_[index(rank)].data<uint32_t>() + own_ * capacity_;
    }
    boxes.from = boxes_[index(own_)].data<uint32_t>();
    boxes.box_stride = ranks_ * capacity_;
    boxes.part_stride = capacity_;
    boxes.counters = counters_.data<BoxCounters>();
    boxes.stop = stop_.data<uint32_t>();
    boxes.timeout_ns = 2'000'000;
    boxes.rank = own_;
    boxes.ranks = ranks_;
    boxes.sends = boxes.receives = 1;
    return boxes;
  }

  // A message of rank `from` arrives in the box of this turn.
  void deliver(int turn, int from, const std::vector<uint32_t>& message) const {
    gpu::copy_to_device(boxes_[index(own_)].data<uint32_t>() + at(turn, from), message.data(),
                        message.size() * sizeof(uint32_t), nullptr);
    gpu::synchronize(nullptr);
  }
  // The message that rank `to` has got from this one.
  std::vector<uint32_t> sent(int turn, int to, size_t count) const {
    const auto all = to_host<uint32_t>(boxes_[index(to)], words());
    const auto first = all.begin() + at(turn, own_);
    return {first, first + static_cast<int64_t>(count)};
  }
  // Words of a box of the own inbox that are not clear, from all ranks.
  int64_t kept(int turn) const {
    const auto all = to_host<uint32_t>(boxes_[index(own_)], words());
    const auto first = all.begin() + at(turn, 0);
    return std::count_if(first, first + ranks_ * capacity_,
                         [](uint32_t word) { return word != kNotArrived; });
  }
  BoxCounters counters() const { return to_host<BoxCounters>(counters_, 1)[0]; }
  uint32_t stop() const { return to_host<uint32_t>(stop_, 1)[0]; }
  void set_turn(uint32_t turn) {
    counters_ = to_device(std::vector<BoxCounters>(1, BoxCounters{turn, 0, 0}));
  }
  void set_stop() { stop_ = to_device(std::vector<uint32_t>(1, 1)); }

 private:
  size_t words() const { return index(kBoxes * ranks_ * capacity_); }
  int64_t at(int turn, int rank) const { return (int64_t{turn} * ranks_ + rank) * capacity_; }

  int ranks_, own_;
  int64_t capacity_;
  std::vector<gpu::DeviceBuffer> boxes_;
  gpu::DeviceBuffer counters_, stop_;
};

}  // namespace fovea::test
