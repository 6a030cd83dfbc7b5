// SPDX-License-Identifier: Apache-2.0
// Parameter blocks of sums over the GPUs of a process, read by host and device code alike.
#pragma once

#include "kernels/cuda/common/layer_params.h"

namespace fovea::kernels::cuda {

constexpr int kMaxSumRanks = 8;

// Counters of one rank, in its own memory; zero at first.
struct RankCounters {
  uint32_t epoch;     // that of the last message
  uint32_t finished;  // number of blocks that have ended the current one
};

// Values of a message are stored in groups of this many, so that the lanes of a warp, which send
// four values each, write adjacent words.
constexpr int64_t kMessageValues = 128;
// Returns where a message has the word of a value, in units of 4 bytes; its mark follows. Of four
// values of a lane, the first two are adjacent, and so are the last two.
constexpr int64_t word_of_value(int64_t value) {
  const int64_t pair = value % 4 / 2, lane = value % kMessageValues / 4;
  return value / kMessageValues * (2 * kMessageValues) + pair * kMessageValues + lane * 4 +
         value % 2 * 2;
}

// How one rank reaches the others. A message is a rank's values of one sum; the epoch counts them.
// Every rank has an inbox [2, ranks, capacity] of words {value, epoch of its message}, zero at
// first, for messages of even and odd epochs. A word whose epoch is the current one has arrived, so
// values need neither fences nor flags of their own. The protocol is NCCL's LL.
//
// An inbox may be overwritten after two messages: a rank sends message n + 2 when it has received
// message n + 1 of all, and each of them has sent that after its own kernel of message n had ended.
struct RankMessages {
  uint32_t* inboxes[kMaxSumRanks];  // one for each rank
  RankCounters* counters;           // own
  // Page-locked host memory of this rank. If it is not 0, kernels stop waiting, and sums are
  // undefined; a kernel that has waited for timeout_ns sets it.
  uint32_t* stop;
  int64_t capacity;  // values, a multiple of kMessageValues
  int64_t timeout_ns;
  int32_t rank, ranks;
};

// As ResidualParams, with the sum over the ranks of their branches, added in the order of the
// ranks. dim is a multiple of 4, and arrays are aligned to 16 bytes. One block a row.
struct SumResidualParams {
  ResidualParams residual;
  RankMessages messages;
};

// receive[i] = sum over the ranks of send[i]. count is a multiple of 4, and arrays, which may be
// the same, are aligned to 16 bytes.
struct SumValuesParams {
  const float* send;
  float* receive;
  int64_t count;
  RankMessages messages;
};

}  // namespace fovea::kernels::cuda
