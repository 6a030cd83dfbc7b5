// SPDX-License-Identifier: Apache-2.0
// Messages that are written into the memory of their receiver, which clears the words afterwards: a
// word that differs from kNotArrived has arrived. So a message needs neither flags nor fences, and
// takes no more bytes than its values.
#pragma once

#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/common/peer_memory.cuh"
#include "kernels/cuda/common/rank_boxes.h"

namespace fovea::kernels::cuda {

// The messages of one exchange: those of this rank, and those of the others.
class Mail {
 public:
  // words: of the message to each rank, a multiple of 4. All threads of the grid.
  __device__ Mail(const RankBoxes& boxes, int words) : boxes_(boxes), words_(words) {
    if (!boxes.counters) return;
    turn_ = turn_of(boxes);
    words_before_ = boxes.counters->words;
  }

  // The box of the message that this rank sends or receives next. Requires that the kernel which
  // took the message before is complete.
  __device__ static uint32_t turn_of(const RankBoxes& boxes) {
    return load_shared_word(&boxes.counters->turn);
  }
  // Sends one word of a message to all other ranks.
  __device__ static void send(const RankBoxes& boxes, uint32_t turn, int at, float value) {
    const uint32_t word = sent(__float_as_uint(value));
    for (int rank = 0; rank < boxes.ranks; ++rank) {
      if (rank != boxes.rank)
        store_shared_word(boxes.to[rank] + turn * boxes.box_stride + at, word);
    }
  }

  __device__ bool is_other(int rank) const { return rank != boxes_.rank && rank < boxes_.ranks; }
  __device__ uint32_t* to(int rank) const { return boxes_.to[rank] + turn_ * boxes_.box_stride; }
  __device__ const uint32_t* from(int rank) const {
    return boxes_.from + turn_ * boxes_.box_stride + rank * boxes_.part_stride;
  }

  __device__ static uint32_t sent(uint32_t word) { return word == kNotArrived ? kOtherNan : word; }
  __device__ static uint4 sent(const uint4& quad) {
    return {sent(quad.x), sent(quad.y), sent(quad.z), sent(quad.w)};
  }

  // Wait for what is at these addresses at once, because each load takes long. Null: there is
  // nothing.
  template <int kCount>
  __device__ void receive(const uint32_t* const (&at)[kCount], uint4 (&quads)[kCount]) const {
    wait([&] { return have_arrived(at, quads); });
  }
  template <int kCount>
  __device__ void receive(const uint32_t* const (&words_at)[kCount], uint32_t (&words)[kCount],
                          const uint32_t* const (&at)[kCount], uint4 (&quads)[kCount]) const {
    wait([&] {
      bool arrived = have_arrived(at, quads);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (words_at[i]) words[i] = load_shared_word(words_at[i]);
        arrived = arrived && (!words_at[i] || words[i] != kNotArrived);
      }
      return arrived;
    });
  }

  // Clears the box of the message before this one. All threads of the grid, kThreads a block.
  template <int kThreads>
  __device__ void clear() const {
    if (!boxes_.counters || !boxes_.receives) return;
    const uint32_t before = (turn_ + kBoxes - 1) % kBoxes;
    constexpr uint4 kClear = {kNotArrived, kNotArrived, kNotArrived, kNotArrived};
    for (int rank = 0; rank < boxes_.ranks; ++rank) {
      if (!is_other(rank)) continue;
      uint32_t* const box = boxes_.from + before * boxes_.box_stride + rank * boxes_.part_stride;
      int at = 4 * (blockIdx.x * kThreads + threadIdx.x);
      for (; at < words_before_; at += 4 * gridDim.x * kThreads) {
        *reinterpret_cast<uint4*>(box + at) = kClear;
      }
    }
  }

  // The last block of the grid counts the message. All threads of every block.
  __device__ void end() const {
    if (!boxes_.counters || !boxes_.receives) return;
    __syncthreads();
    if (threadIdx.x != 0) return;
    const uint32_t last = gridDim.x - 1;
    if (increment_acquire_release(&boxes_.counters->finished, last) != last) return;
    boxes_.counters->words = words_;
    store_shared_word(&boxes_.counters->turn, (turn_ + 1) % kBoxes);
  }

 private:
  template <int kCount>
  __device__ static bool have_arrived(const uint32_t* const (&at)[kCount], uint4 (&quads)[kCount]) {
    bool arrived = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!at[i]) continue;
      quads[i] = load_shared_quad(at[i]);
      arrived = arrived && quads[i].x != kNotArrived && quads[i].y != kNotArrived &&
                quads[i].z != kNotArrived && quads[i].w != kNotArrived;
    }
    return arrived;
  }

  template <class Arrived>
  __device__ void wait(const Arrived& arrived) const {
    constexpr uint32_t kTriesAtOnce = 256;
    int64_t begin = 0;
    for (uint32_t tries = 1; !arrived(); ++tries) {
      if (tries % kTriesAtOnce == 0 && stops(begin)) return;
    }
  }
  // begin: when this was first asked, 0 before.
  __device__ bool stops(int64_t& begin) const {
    if (load_shared_word(boxes_.stop) != 0) return true;
    const int64_t now = global_nanoseconds();
    if (begin == 0) begin = now;
    if (now - begin < boxes_.timeout_ns) return false;
    store_shared_word(boxes_.stop, 1);
    return true;
  }

  const RankBoxes& boxes_;
  const int words_;
  uint32_t turn_ = 0;
  int words_before_ = 0;
};

}  // namespace fovea::kernels::cuda
