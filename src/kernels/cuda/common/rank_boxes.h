// SPDX-License-Identifier: Apache-2.0
// Messages between the GPUs of ranks, read by host and device code alike.
#pragma once

#ifdef __CUDACC_RTC__
#include "kernels/cuda/common/types.cuh"
#else
#include <cstdint>
#endif

namespace fovea::kernels::cuda {

constexpr int kMaxBoxRanks = 8;

// A word of a box that holds this has not arrived. Two NaNs of 16 bits, or one of 32: senders write
// kOtherNan instead.
constexpr uint32_t kNotArrived = 0xffffffff;
constexpr uint32_t kOtherNan = 0x7fffffff;

// Boxes that an inbox has room for, used in turn.
constexpr int kBoxes = 3;

// Counters of one rank, in its own memory; zero at first.
struct BoxCounters {
  uint32_t turn;      // box of the next message
  uint32_t finished;  // blocks that have ended the current message
  int32_t words;      // length of the last message to each rank
};

// How one rank exchanges messages of words with the others. There are two ways:
//
// Over peers' memory, every rank has an inbox [kBoxes, ranks, capacity] of words. Ranks write their
// messages into the boxes of all others; words of kNotArrived are waited for. The kernel of message
// n clears the box of message n - 1, which the sender of message n + 2 may then use: it sends that
// after it has received message n + 1, which its receiver has sent after its kernel of message n
// had ended.
//
// Over a communicator, one kernel writes all messages to memory of its own GPU (`sends` alone), the
// communicator exchanges them, and a second kernel takes what has arrived (`receives` alone).
//
// With neither, a rank computes with its own part only.
struct RankBoxes {
  uint32_t* to[kMaxBoxRanks];  // where the message to each rank begins, in box 0
  uint32_t* from;              // box 0 of the own inbox
  int64_t box_stride;          // words between boxes; 0: there is one
  int64_t part_stride;         // words between the messages of two ranks in a box of `from`
  BoxCounters* counters;       // null if there is one box
  // Page-locked host memory of this rank. If it is not 0, kernels stop waiting, and results are
  // undefined; a kernel that has waited for timeout_ns sets it.
  uint32_t* stop;
  int64_t timeout_ns;
  int32_t rank, ranks;
  int32_t sends, receives;  // not 0: true
};

}  // namespace fovea::kernels::cuda
