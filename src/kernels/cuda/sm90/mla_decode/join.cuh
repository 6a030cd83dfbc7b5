// SPDX-License-Identifier: Apache-2.0
// The parts of a row tile, joined by the blocks that computed them, each a share of the rows. A
// block stores its part and counts it; when it has no more work it waits for the others' parts. Not
// for ever, for nothing promises that they run at the same time: a block that gives up counts that,
// and the one whose part is the last joins all rows then. Whoever joins, sums are the same.
#pragma once

#include "kernels/cuda/common/log2.cuh"
#include "kernels/cuda/sm90/mla_decode/config.cuh"

namespace fovea::kernels::cuda {

// A counter: parts stored below 16 bits, blocks that gave up above, and a bit that flips whenever
// all parts are stored: launch after launch begins with the counter as the one before left it.
constexpr uint32_t kPartsMask = 0xffff;
constexpr uint32_t kGaveUp = 1u << 16;
constexpr uint32_t kTurn = 1u << 31;

__device__ __forceinline__ uint32_t add_to_counter(uint32_t* counter, uint32_t n) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(n)
               : "memory");
  return before;
}

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
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter),
                 "r"(kTurn - parts - gave_up)
                 : "memory");
    return gave_up ? all_rows : own_rows;
  }
  const int64_t begin = clock64();
  do {
    uint32_t now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    if (all_stored(now, before, parts)) return own_rows;
  } while (clock64() - begin < patience);
  if (!all_stored(add_to_counter(counter, kGaveUp), before, parts)) return no_rows;
  add_to_counter(counter, -kGaveUp);
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

// A share of a tile's rows, and what of them a thread has: four columns of each row_step-th row, of
// all parts. Where rows are fewer than that, all threads have the same rows and each every
// groups-th part. What takes divisions is found before the parts are waited for.
template <class C>
struct JoinShare {
  static constexpr int kThreadColumns = 4;
  static constexpr int kRowThreads = C::kRank / kThreadColumns;
  static constexpr int kRowStep = kConsumerThreads / kRowThreads;
  static_assert(kRowStep > 1 && kRowStep <= 32);

  int parts, log_parts;  // the latter of the next power of two
  int begin, rows;
  int first_row, row_step, group, groups, column;
  int64_t place;  // of the share's first row in slot 2 * first worker
  JoinedRows to;

  __device__ __forceinline__ JoinShare(const MlaDecodeParams& params, const OpenPart& open,
                                       int number)
      : parts(count_of_parts(open.partial)),
        log_parts(32 - __clz(parts - 1)),
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

// Shared memory where keys and queries were.
template <class C>
struct JoinSpace {
  static constexpr int kThreadParts =
      sizeof(C::SharedMemory::kv) / (kConsumerThreads * sizeof(float4));
  static constexpr int kWeights = 256;  // rows of a share by parts, their number a power of two
  float4 (*values)[kConsumerThreads];   // [kThreadParts]: what each thread adds up
  float *lse, *factors;                 // [kWeights]

  __device__ __forceinline__ explicit JoinSpace(typename C::SharedMemory& shared) {
    static_assert(2 * kWeights * sizeof(float) <= sizeof(shared.q));
    values = reinterpret_cast<float4(*)[kConsumerThreads]>(&shared.kv);
    lse = reinterpret_cast<float*>(&shared.q);
    factors = lse + kWeights;
  }
};

template <class C>
__device__ __forceinline__ void ask_for_lses(const MlaDecodeParams& params,
                                             const JoinShare<C>& share, const JoinSpace<C>& space) {
#pragma unroll 1
  for (int i = join_thread(); i < share.rows << share.log_parts; i += kConsumerThreads) {
    const int part = i & (1 << share.log_parts) - 1;
    if (part >= share.parts) continue;
    const int64_t place = share.place + share.row_of(i >> share.log_parts, part);
    copy_word_async(&space.lse[i], params.work.partial_lse + place, sizeof(float));
  }
  commit_copies();
}

// What the parts of a share's rows weigh, and the rows' LSE. All threads meet here.
template <class C>
__device__ __forceinline__ void weigh_parts(const MlaDecodeParams& params, const OpenPart& open,
                                            const JoinShare<C>& share, const JoinSpace<C>& space) {
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
#pragma unroll 1
  for (int i = join_thread(); i < share.rows << share.log_parts; i += kConsumerThreads) {
    const int row = i >> share.log_parts;
    const int part = i - (row << share.log_parts);
    if (part >= share.parts) continue;
    const float* of_row = space.lse + (row << share.log_parts);
    float most = -infinity();
#pragma unroll 8
    for (int p = 0; p < share.parts; ++p) most = fmaxf(most, of_row[p]);
    const float base = most == -infinity() ? 0 : most;
    float total = 0;
#pragma unroll 8
    for (int p = 0; p < share.parts; ++p) total += exp2_fast((of_row[p] - base) * kLog2E);
    const float inverse = total > 0 ? __fdividef(1.0f, total) : 0;
    space.factors[i] = exp2_fast((of_row[part] - base) * kLog2E) * inverse;
    if (params.lse && part == 0) {
      params.lse[static_cast<int64_t>(open.q_begin) * params.q_heads + open.first_row +
                 share.begin + row] = total > 0 ? base + log2f(total) * kLn2 : -infinity();
    }
  }
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);
}

// The rows of one share. Copies to shared memory have all parts on their way at a time, which
// registers could not take.
template <class C>
__device__ __forceinline__ void join_rows(const MlaDecodeParams& params,
                                          typename C::SharedMemory& shared, const OpenPart& open,
                                          JoinShare<C>& share) {
  if (share.rows <= 0) return;
  const JoinSpace<C> space(shared);
  ask_for_lses<C>(params, share, space);
  const int thread = join_thread();
  const float* values =
      static_cast<const float*>(params.work.partial_out) + share.place * C::kRank + share.column;
  const auto values_of = [&](int row, int part) {
    return values + share.row_of(row, part) * C::kRank;
  };
  int n = 0;
#pragma unroll 1
  for (int row = share.first_row; row < share.rows; row += share.row_step) {
    const float* from = values_of(row, share.group);
#pragma unroll 4
    for (int part = share.group; part < share.parts; part += share.groups, ++n) {
      if (n >= space.kThreadParts) break;
      copy_async(&space.values[n][thread], from, sizeof(float4));
      from += share.groups * (2 * C::kRows * C::kRank);
      if (part == 0) from -= C::kRows * C::kRank;
    }
  }
  commit_copies();
  wait_copies<1>();
  weigh_parts<C>(params, open, share, space);
  wait_copies<0>();
  n = 0;
#pragma unroll 1
  for (int row = share.first_row; row < share.rows; row += share.row_step) {
    float sum[JoinShare<C>::kThreadColumns] = {};
    const float* factors = space.factors + (row << share.log_parts);
#pragma unroll 4
    for (int part = share.group; part < share.parts; part += share.groups, ++n) {
      // More than fit where a hundred blocks have one row each.
      const float4 v = n < space.kThreadParts
                           ? space.values[n][thread]
                           : __ldcg(reinterpret_cast<const float4*>(values_of(row, part)));
      const float factor = factors[part];
      sum[0] += factor * v.x;
      sum[1] += factor * v.y;
      sum[2] += factor * v.z;
      sum[3] += factor * v.w;
    }
#pragma unroll 1
    for (int step = 32 / share.groups; step < 32; step *= 2) {
#pragma unroll
      for (float& one : sum) one += __shfl_xor_sync(~0u, one, step);
    }
    if (share.group == 0) {
      uint16_t* to = static_cast<uint16_t*>(params.out) + share.to.token * params.out_token_stride +
                     share.to.head * params.out_head_stride + share.column;
      *reinterpret_cast<uint2*>(to) = {pack<C::kQ>(sum[0], sum[1]), pack<C::kQ>(sum[2], sum[3])};
    }
    share.to.advance(params, share.row_step);
  }
  named_barrier_wait(kConsumersBarrier, kConsumerThreads);  // factors have been read
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
      if (join_thread() == 0) open.state = add_to_counter(counter(open.partial), 1);
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
          join_rows<C>(params_, shared_, open, share);
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
