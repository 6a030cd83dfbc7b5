// SPDX-License-Identifier: Apache-2.0
// Joins the parts of a row tile through global memory: each of the blocks that computed them joins
// a share of the rows. A block stores its part and counts it; when it has no more work it waits for
// the parts of the others. It does not wait forever, since nothing guarantees that they run at the
// same time: a block that gives up counts that, and the block whose part is the last one then joins
// all rows. The sums are the same whichever block joins.
#pragma once

#include "kernels/cuda/common/counters.cuh"
#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/sm90/mla_decode_16/config.cuh"

namespace fovea::kernels::cuda {

// Counter of a row tile: parts stored in the low 16 bits, above them the blocks that gave up, and a
// bit that flips whenever all parts are stored. A launch starts with the counter as the preceding
// one left it.
constexpr uint32_t kPartsMask = 0xffff;
constexpr uint32_t kGaveUp = 1u << 16;
constexpr uint32_t kTurn = 1u << 31;

__device__ __forceinline__ bool all_stored(uint32_t now, uint32_t before, int parts) {
  return ((now ^ before) & kTurn) || (now & kPartsMask) == static_cast<uint32_t>(parts);
}

// Which shares a block joins.
enum JoinRows : uint32_t { no_rows, own_rows, all_rows };

// Waits for the parts of a row tile, up to `patience` cycles. On return the parts of the rows to
// join are visible. One thread.
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

// Token and head of the rows that a thread joins, one after the other.
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

// A share of a tile's rows, and what a thread joins of it: eight columns of each row_step-th row,
// over all parts. If the share has fewer rows than that, all threads have the same rows, and each
// takes every groups-th part. Everything that needs divisions is computed before the wait for the
// parts.
template <class C>
struct JoinShare {
  static constexpr int kThreadColumns = sizeof(uint4) / sizeof(uint16_t);
  static constexpr int kRowThreads = C::kRank / kThreadColumns;
  static constexpr int kRowStep = kConsumerThreads / kRowThreads;
  static_assert(kRowStep > 1 && kRowStep <= 32);

  int parts;
  int begin, rows;
  int first_row, row_step, group, groups, column;
  int64_t place;  // place of the share's first row in slot 2 * first worker
  JoinedRows to;

  __device__ __forceinline__ JoinShare(const MlaDecodeParams& params, const OpenPart& open,
                                       int number)
      : parts(count_of_parts(open.partial)),
        begin(number * ((open.rows + parts - 1) / parts)),
        place(int64_t{2} * first_of_parts(open.partial) * C::kRows + begin),
        to(params, open, begin) {
    const int share = (open.rows + parts - 1) / parts;
    rows = min(share, open.rows - begin);
    const int thread = consumer_thread();
    const bool different_rows = share >= kRowStep;
    row_step = different_rows ? kRowStep : 1;
    first_row = different_rows ? thread / kRowThreads : 0;
    groups = different_rows ? 1 : kRowStep;
    constexpr int kLanes = 32 / kRowStep;  // lanes of a warp with different columns
    group = different_rows ? 0 : thread % 32 / kLanes;
    column = kThreadColumns *
             (different_rows ? thread % kRowThreads : thread / 32 * kLanes + thread % kLanes);
    to.advance(params, first_row);
  }
  // Row of partial results, counted from `place`. Only the first part is in its worker's second
  // slot.
  __device__ __forceinline__ int row_of(int row, int part) const {
    return part * (2 * C::kRows) + row + (part == 0 ? C::kRows : 0);
  }
};

// Sum of a row's parts in a thread's columns, relative to e^max.
template <int kColumns>
struct JoinedSum {
  float (&sum)[kColumns];
  float& total;
  float& max;

  __device__ __forceinline__ void refer_to(float next) {
    const float scale = max == -infinity() ? 0 : exp2_fast((max - next) * kLog2E);
    total *= scale;
#pragma unroll
    for (float& one : sum) one *= scale;
    max = next;
  }
  // Adds the sums of lanes that have other parts of the row.
  __device__ __forceinline__ void add_lanes(int groups) {
#pragma unroll 1
    for (int step = 32 / groups; step < 32; step *= 2) {
      const float next = fmaxf(max, __shfl_xor_sync(~0u, max, step));
      refer_to(next);
      total += __shfl_xor_sync(~0u, total, step);
#pragma unroll
      for (float& one : sum) one += __shfl_xor_sync(~0u, one, step);
    }
  }
};

// Joins the parts that a block has stored.
template <class C>
class BlockJoin {
 public:
  __device__ __forceinline__ BlockJoin(const MlaDecodeParams& params,
                                       typename C::SharedMemory& shared)
      : params_(params), shared_(shared) {}

  // Counts the item if it is a part, which all threads have stored.
  __device__ __forceinline__ void count(const RowTile& tile) {
    if (tile.item.partial < 0) return;
    OpenPart& open = shared_.join.open[count_++];
    if (consumer_thread() == 0) {
      open = {tile.view.q_begin, tile.first_row, tile.rows, tile.item.partial, 0};
    }
    sync_consumers();
    if (consumer_thread() == 0) open.state = add_acquire_release(counter(open.partial), 1);
  }

  // Joins the row tiles of the counted parts, once the block has no more work.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int i = 0; i < count_; ++i) {
      OpenPart& open = shared_.join.open[i];
      int number = static_cast<int>(blockIdx.x) - first_of_parts(open.partial);
      JoinShare<C> share(params_, open, number);
      const int parts = share.parts;
      if (consumer_thread() == 0) {
        open.state = await_parts(counter(open.partial), open.state, parts, params_.join_patience);
      }
      sync_consumers();
#pragma unroll 1
      for (int left = open.state == all_rows ? parts : open.state == own_rows; left > 0; --left) {
        join(open, share);
        number = number + 1 < parts ? number + 1 : 0;
        if (left > 1) share = JoinShare<C>(params_, open, number);
      }
    }
  }

 private:
  static constexpr int kColumns = JoinShare<C>::kThreadColumns;
  using Sum = JoinedSum<kColumns>;

  __device__ __forceinline__ uint32_t* counter(int partial) const {
    return params_.work.arrivals + first_of_parts(partial);
  }

  // Joins the rows of one share. A thread computes the weights of what it reads, so that no thread
  // waits for another.
  __device__ __forceinline__ void join(const OpenPart& open, JoinShare<C>& share) const {
    const uint16_t* parts = static_cast<const uint16_t*>(params_.work.partial_out) +
                            share.place * C::kRank + share.column;
    const float* lses = params_.work.partial_lse + share.place;
    const float* units =
        params_.work.partial_units + 2 * share.place + (share.column >= C::kRank / 2);
#pragma unroll 1
    for (int row = share.first_row; row < share.rows; row += share.row_step) {
      float values[kColumns] = {};
      float total = 0;
      float max = -infinity();
      Sum sum{values, total, max};
      add_parts(share, row, parts, lses, units, sum);
      sum.add_lanes(share.groups);
      if (share.group == 0) store(open, share, row, sum);
      share.to.advance(params_, share.row_step);
    }
  }

  // Adds the thread's parts of a row, in batches that are loaded at the same time.
  __device__ __forceinline__ static void add_parts(const JoinShare<C>& share, int row,
                                                   const uint16_t* values, const float* lses,
                                                   const float* units, Sum& sum) {
    constexpr int kBatch = 8;
#pragma unroll 1
    for (int first = share.group; first < share.parts; first += kBatch * share.groups) {
      float lse[kBatch], unit[kBatch];
      uint4 words[kBatch];
      float next = sum.max;
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
      sum.refer_to(next);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = exp2_fast((lse[i] - next) * kLog2E);
        sum.total += weight;
        const float factor = weight * unit[i];
        const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum.sum[2 * k] += factor * to_float<f16>(static_cast<uint16_t>(pairs[k]));
          sum.sum[2 * k + 1] += factor * to_float<f16>(static_cast<uint16_t>(pairs[k] >> 16));
        }
      }
    }
  }

  __device__ __forceinline__ void store(const OpenPart& open, const JoinShare<C>& share, int row,
                                        const Sum& sum) const {
    const float inverse = sum.total > 0 ? __fdividef(1.0f, sum.total) : 0;
    uint32_t out[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      out[i] = pack<C::kQ>(sum.sum[2 * i] * inverse, sum.sum[2 * i + 1] * inverse);
    }
    uint16_t* to = static_cast<uint16_t*>(params_.out.data) +
                   share.to.token * params_.out.token_stride +
                   share.to.head * params_.out.head_stride + share.column;
    *reinterpret_cast<uint4*>(to) = {out[0], out[1], out[2], out[3]};
    if (params_.out.lse && share.column == 0) {
      params_.out.lse[static_cast<int64_t>(open.q_begin) * params_.q_heads + open.first_row +
                      share.begin + row] =
          sum.total > 0 ? sum.max + log2f(sum.total) * kLn2 : -infinity();
    }
  }

  const MlaDecodeParams& params_;
  typename C::SharedMemory& shared_;
  int count_ = 0;
};

}  // namespace fovea::kernels::cuda
