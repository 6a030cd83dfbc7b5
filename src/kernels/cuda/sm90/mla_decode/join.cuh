// SPDX-License-Identifier: Apache-2.0
// The parts of a row tile, joined by the blocks that computed them, each a share of the rows. A
// block stores its part and counts it; when it has no more work it waits for the others' parts. Not
// for ever, for nothing promises that they run at the same time: a block that gives up counts that,
// and the one whose part is the last joins all rows then. Whoever joins, sums are the same.
#pragma once

#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// A counter: parts stored below 16 bits, blocks that gave up above, and a bit that flips whenever
// all parts are stored: launch after launch begins with the counter as the one before left it.
constexpr uint32_t kPartsMask = 0xffff;
constexpr uint32_t kGaveUp = 1u << 16;
constexpr uint32_t kTurn = 1u << 31;

__device__ __forceinline__ bool all_stored(uint32_t now, uint32_t before, int parts) {
  return ((now ^ before) & kTurn) || (now & kPartsMask) == static_cast<uint32_t>(parts);
}

// Whose rows a block is to join.
enum JoinRows : uint32_t { no_rows, own_rows, all_rows };

// One thread. Behind it the parts of the rows are visible.
__device__ __forceinline__ JoinRows await_parts(uint32_t* counter, uint32_t before, int parts,
                                                int patience) {
  if ((before & kPartsMask) == static_cast<uint32_t>(parts - 1)) {
    const uint32_t gave_up = before & ~(kTurn | kPartsMask);
    add_relaxed(counter, kTurn - parts - gave_up);
    return gave_up ? all_rows : own_rows;
  }
  const int64_t begin = clock64();
  do {
    if (all_stored(load_acquire(counter), before, parts)) return own_rows;
  } while (clock64() - begin < patience);
  if (!all_stored(add_acquire_release(counter, kGaveUp), before, parts)) return no_rows;
  add_acquire_release(counter, -kGaveUp);
  return own_rows;
}

// Of those that join: all but the producer's.
__device__ __forceinline__ int join_thread() {
  return static_cast<int>(threadIdx.x) - kWarpgroupThreads;
}

// Where rows that a thread joins go, one after the other.
struct JoinedRows {
  int64_t token;
  int head;

  __device__ __forceinline__ JoinedRows(const MlaDecodeParams& params, const OpenPart& open,
                                        int row) {
    const int packed = open.first_row + row;
    token = open.q_begin + packed / params.q_heads;
    head = packed % params.q_heads;
  }
  __device__ __forceinline__ void advance(const MlaDecodeParams& params, int rows) {
    head += rows;
    if (head < params.q_heads) return;
    token += head / params.q_heads;
    head %= params.q_heads;
  }
};

// A share of a tile's rows, and what of them a thread has: eight columns of each row_step-th row,
// of all parts. Where rows are fewer than that, all threads have the same rows and each every
// groups-th part. What takes divisions is found before the parts are waited for.
template <class C>
struct JoinShare {
  static constexpr int kThreadColumns = sizeof(uint4) / sizeof(uint16_t);
  static constexpr int kRowThreads = C::kRank / kThreadColumns;
  static constexpr int kRowStep = kConsumerThreads / kRowThreads;
  static_assert(kRowStep > 1 && kRowStep <= 32);

  int parts;
  int begin, rows;
  int first_row, row_step, group, groups, column;
  int64_t place;  // of the share's first row in slot 2 * first worker
  JoinedRows to;

  __device__ __forceinline__ JoinShare(const MlaDecodeParams& params, const OpenPart& open,
                                       int number)
      : parts(count_of_parts(open.partial)),
        begin(number * ((open.rows + parts - 1) / parts)),
        place(int64_t{2} * first_of_parts(open.partial) * C::kRows + begin),
        to(params, open, begin) {
    const int share = (open.rows + parts - 1) / parts;
    rows = min(share, open.rows - begin);
    const int thread = join_thread();
    const bool apart = share >= kRowStep;
    row_step = apart ? kRowStep : 1;
    first_row = apart ? thread / kRowThreads : 0;
    groups = apart ? 1 : kRowStep;
    constexpr int kLanes = 32 / kRowStep;  // of a warp, with different columns
    group = apart ? 0 : thread % 32 / kLanes;
    column =
        kThreadColumns * (apart ? thread % kRowThreads : thread / 32 * kLanes + thread % kLanes);
    to.advance(params, first_row);
  }
  // Rows of partial results from `place`; only the first part is in its worker's second slot.
  __device__ __forceinline__ int row_of(int row, int part) const {
    return part * (2 * C::kRows) + row + (part == 0 ? C::kRows : 0);
  }
};

// The rows of one share. A thread weighs what it reads: all loads of a batch of parts are on their
// way at a time, and nobody waits for other threads.
template <class C>
__device__ __forceinline__ void join_rows(const MlaDecodeParams& params, const OpenPart& open,
                                          JoinShare<C>& share) {
  constexpr int kBatch = 8;
  constexpr int kColumns = JoinShare<C>::kThreadColumns;
  const uint16_t* values =
      static_cast<const uint16_t*>(params.work.partial_out) + share.place * C::kRank + share.column;
  const float* lses = params.work.partial_lse + share.place;
  const float* units =
      params.work.partial_units + 2 * share.place + (share.column >= C::kValueColumns);
#pragma unroll 1
  for (int row = share.first_row; row < share.rows; row += share.row_step) {
    float sum[kColumns] = {};
    float total = 0;
    float most = -infinity();  // what sum and total refer to
    const auto refer_to = [&](float next) {
      const float scale = most == -infinity() ? 0 : exp2_fast((most - next) * kLog2E);
      total *= scale;
#pragma unroll
      for (float& one : sum) one *= scale;
      most = next;
    };
#pragma unroll 1
    for (int first = share.group; first < share.parts; first += kBatch * share.groups) {
      float lse[kBatch], unit[kBatch];
      uint4 words[kBatch];
      float next = most;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int part = first + i * share.groups;
        const int at = share.row_of(row, part);
        const bool exists = part < share.parts;
        lse[i] = exists ? __ldcg(&lses[at]) : -infinity();
        unit[i] = exists ? __ldcg(&units[2 * at]) : 0;
        words[i] =
            exists ? __ldcg(reinterpret_cast<const uint4*>(values + at * C::kRank)) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) next = fmaxf(next, lse[i]);
      if (next == -infinity()) continue;
      refer_to(next);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = exp2_fast((lse[i] - next) * kLog2E);
        total += weight;
        const float factor = weight * unit[i];
        const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum[2 * k] += factor * to_float<f16>(static_cast<uint16_t>(pairs[k]));
          sum[2 * k + 1] += factor * to_float<f16>(static_cast<uint16_t>(pairs[k] >> 16));
        }
      }
    }
#pragma unroll 1
    for (int step = 32 / share.groups; step < 32; step *= 2) {
      const float next = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      refer_to(next);
      total += __shfl_xor_sync(~0u, total, step);
#pragma unroll
      for (float& one : sum) one += __shfl_xor_sync(~0u, one, step);
    }
    if (share.group == 0) {
      const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
      uint32_t out[kColumns / 2];
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        out[i] = pack<C::kQ>(sum[2 * i] * inverse, sum[2 * i + 1] * inverse);
      }
      uint16_t* to = static_cast<uint16_t*>(params.out) + share.to.token * params.out_token_stride +
                     share.to.head * params.out_head_stride + share.column;
      *reinterpret_cast<uint4*>(to) = {out[0], out[1], out[2], out[3]};
      if (params.lse && share.column == 0) {
        params.lse[static_cast<int64_t>(open.q_begin) * params.q_heads + open.first_row +
                   share.begin + row] = total > 0 ? most + log2f(total) * kLn2 : -infinity();
      }
    }
    share.to.advance(params, share.row_step);
  }
}

// The parts that a block has stored.
template <class C>
class OpenParts {
 public:
  __device__ __forceinline__ OpenParts(const MlaDecodeParams& params,
                                       typename C::SharedMemory& shared)
      : params_(params), shared_(shared) {}

  // Counts the item's part, if it is one, which all threads have stored.
  __device__ __forceinline__ void count(const RowTile& tile) {
    if constexpr (C::kJoinsParts) {
      if (tile.item.partial < 0) return;
      OpenPart& open = shared_.join.open[count_++];
      if (join_thread() == 0) {
        open = {tile.view.q_begin, tile.first_row, tile.rows, tile.item.partial, 0};
      }
      named_barrier_wait(kConsumersBarrier, kConsumerThreads);
      if (join_thread() == 0) open.state = add_acquire_release(counter(open.partial), 1);
    }
  }

  // Joins what they are parts of, once there is no more work for the block.
  __device__ __forceinline__ void join() {
    if constexpr (C::kJoinsParts) {
#pragma unroll 1
      for (int i = 0; i < count_; ++i) {
        OpenPart& open = shared_.join.open[i];
        int number = static_cast<int>(blockIdx.x) - first_of_parts(open.partial);
        JoinShare<C> share(params_, open, number);
        const int parts = share.parts;
        if (join_thread() == 0) {
          open.state = await_parts(counter(open.partial), open.state, parts, params_.join_patience);
        }
        named_barrier_wait(kConsumersBarrier, kConsumerThreads);
#pragma unroll 1
        for (int left = open.state == all_rows ? parts : open.state == own_rows; left > 0; --left) {
          join_rows<C>(params_, open, share);
          number = number + 1 < parts ? number + 1 : 0;
          if (left > 1) share = JoinShare<C>(params_, open, number);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t* counter(int partial) const {
    return params_.work.arrivals + first_of_parts(partial);
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  int count_ = 0;
};

}  // namespace fovea::kernels::cuda
