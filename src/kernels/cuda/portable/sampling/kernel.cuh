// SPDX-License-Identifier: Apache-2.0
// Draws tokens from logits, one CTA a row, as Sampler does on the CPU. With a mask, tokens outside
// of it lose their logits first.
//
// min_p, top_k and top_p all keep the first tokens in order of rank, so each of them, and the draw
// itself, asks one question: at which rank does a running sum pass a target? A histogram over
// ln(p_max / p) gives the bucket. The tokens of that bucket are then ranked against each other; if
// they are too many, a radix search reads the bits of their logits. Weights are integers
// (kWeightBits), so that sums do not depend on the order of threads. Without top_k and top_p the
// running sum follows token ids, as on the CPU, which does not sort then.
#pragma once

#include "kernels/cuda/portable/sampling/config.cuh"

namespace fovea::kernels::cuda {

template <int kThreads>
struct SamplingConfig {
  using Params = DrawParams;
  static constexpr int kBlocksPerSm = 1;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kScanned = kBuckets / kThreads;  // buckets a thread

  using Shared = SamplingShared<kThreads>;
  static constexpr KernelTraits kTraits = {kThreads, sizeof(Shared), 1, 0};

  // Gives tokens that the draw's mask lacks the logit -inf.
  __device__ static void forbid(const Params& params, const Draw& draw, float* logits) {
    const uint32_t* const mask = params.masks + draw.mask * params.mask_words;
    for (int i = threadIdx.x; i < params.vocabulary; i += kThreads) {
      if ((mask[i / 32] >> (i % 32) & 1) == 0) logits[i] = -infinity();
    }
    __syncthreads();
  }

  // Returns the first token with the largest logit, or -1 if the row is no distribution.
  __device__ static int find_largest(const Params& params, const float* logits, Shared& shared) {
    float largest = -infinity();
    int best = params.vocabulary;
    bool bad = false;
    for (int i = threadIdx.x; i < params.vocabulary; i += kThreads) {
      const float value = logits[i];
      bad |= !(value < infinity());
      if (value > largest) {
        largest = value;
        best = i;
      }
    }
    for (int step = 16; step > 0; step /= 2) {
      take_larger(largest, best, __shfl_xor_sync(~0u, largest, step),
                  __shfl_xor_sync(~0u, best, step));
    }
    if (threadIdx.x % 32 == 0) {
      shared.largest[threadIdx.x / 32] = largest;
      shared.best[threadIdx.x / 32] = best;
    }
    bad = __syncthreads_or(bad);
    for (int warp = 0; warp < kWarps; ++warp) {
      take_larger(largest, best, shared.largest[warp], shared.best[warp]);
    }
    return bad || best == params.vocabulary ? -1 : best;
  }

  // Each thread sorts the best of its own tokens, of which all threads then choose.
  __device__ static void find_likeliest(const Params& params, const float* logits, float largest,
                                        LikelyToken* likeliest, Shared& shared) {
    float values[kMaxLikeliest];
    int ids[kMaxLikeliest];
    for (int k = 0; k < kMaxLikeliest; ++k) {
      values[k] = -infinity();
      ids[k] = params.vocabulary;
    }
    float sum = 0;
    for (int i = threadIdx.x; i < params.vocabulary; i += kThreads) {
      float value = logits[i];
      sum += expf(value - largest);
      if (!(value > values[kMaxLikeliest - 1])) continue;
      int id = i;
#pragma unroll
      for (int k = 0; k < kMaxLikeliest; ++k) {
        if (!(value > values[k])) continue;
        const float lower = values[k];
        const int lower_id = ids[k];
        values[k] = value;
        ids[k] = id;
        value = lower;
        id = lower_id;
      }
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += shared.largest[warp];
    for (int rank = 0; rank < params.likeliest_count; ++rank) {
      float best = values[0];
      int id = ids[0];
      for (int step = 16; step > 0; step /= 2) {
        take_larger(best, id, __shfl_xor_sync(~0u, best, step), __shfl_xor_sync(~0u, id, step));
      }
      __syncthreads();
      if (threadIdx.x % 32 == 0) {
        shared.largest[threadIdx.x / 32] = best;
        shared.best[threadIdx.x / 32] = id;
      }
      __syncthreads();
      for (int warp = 0; warp < kWarps; ++warp) {
        take_larger(best, id, shared.largest[warp], shared.best[warp]);
      }
      if (threadIdx.x == 0) likeliest[rank] = {id, best - largest - logf(sum)};
      if (id != ids[0]) continue;
#pragma unroll
      for (int k = 1; k < kMaxLikeliest; ++k) {
        values[k - 1] = values[k];
        ids[k - 1] = ids[k];
      }
      values[kMaxLikeliest - 1] = -infinity();
      ids[kMaxLikeliest - 1] = params.vocabulary;
    }
    __syncthreads();
  }

  __device__ static void take_larger(float& largest, int& best, float value, int id) {
    if (value > largest || (value == largest && id < best)) {
      largest = value;
      best = id;
    }
  }

  __device__ static void clear(Histogram& histogram) {
    for (int i = threadIdx.x; i < kBuckets; i += kThreads) {
      histogram.weight[i] = 0;
      histogram.count[i] = 0;
    }
    __syncthreads();
  }

  __device__ static void add(Histogram& histogram, int bucket, uint64_t weight) {
    atomicAdd(&histogram.weight[bucket], weight);
    atomicAdd(&histogram.count[bucket], 1u);
  }

  // The amounts of all buckets before the thread's own, and of all buckets.
  struct Scan {
    Amount before, total;
  };
  __device__ static Scan scan(const Histogram& histogram, Shared& shared) {
    Amount own = {0, 0};
    for (int i = 0; i < kScanned; ++i) {
      own.weight += histogram.weight[kScanned * threadIdx.x + i];
      own.count += histogram.count[kScanned * threadIdx.x + i];
    }
    Amount sum = own;  // inclusive
    for (int step = 1; step < 32; step *= 2) {
      const uint64_t weight = __shfl_up_sync(~0u, sum.weight, step);
      const uint32_t count = __shfl_up_sync(~0u, sum.count, step);
      if (threadIdx.x % 32 < step) continue;
      sum.weight += weight;
      sum.count += count;
    }
    if (threadIdx.x % 32 == 31) shared.warps[threadIdx.x / 32] = sum;
    __syncthreads();
    Scan result = {{sum.weight - own.weight, sum.count - own.count}, {0, 0}};
    for (int warp = 0; warp < kWarps; ++warp) {
      const Amount amount = shared.warps[warp];
      if (warp < threadIdx.x / 32) {
        result.before.weight += amount.weight;
        result.before.count += amount.count;
      }
      result.total.weight += amount.weight;
      result.total.count += amount.count;
    }
    __syncthreads();
    return result;
  }

  // Returns the bucket in which `front` plus a running sum passes `target`, and adds the buckets
  // before it to `front`.
  __device__ static int find(const Histogram& histogram, bool by_count, uint64_t target,
                             Amount& front, Shared& shared) {
    Amount before = scan(histogram, shared).before;
    before.weight += front.weight;
    before.count += front.count;
    for (int i = kScanned * threadIdx.x; i < kScanned * (threadIdx.x + 1); ++i) {
      const Amount after = {before.weight + histogram.weight[i], before.count + histogram.count[i]};
      const uint64_t low = by_count ? before.count : before.weight;
      const uint64_t high = by_count ? after.count : after.weight;
      if (low <= target && target < high) {
        shared.bucket = i;
        shared.before = before;
      }
      before = after;
    }
    __syncthreads();
    front = shared.before;
    const int bucket = shared.bucket;
    __syncthreads();
    return bucket;
  }

  // Searches by rank among the tokens of a bucket, at most one a thread.
  __device__ static Place search_few(const Row& row, int bucket, Amount front, bool by_count,
                                     uint64_t target, Shared& shared) {
    // A rank is a key above an id, which orders tokens by rank.
    unsigned long long* const ranks = shared.fine.weight;
    unsigned long long* const weights = ranks + kThreads;
    if (threadIdx.x == 0) shared.candidates = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.vocabulary; i += kThreads) {
      const float logit = row.logits[i];
      if (row.bucket(logit) != bucket) continue;
      const uint64_t weight = row.weight(logit);
      if (weight == 0) continue;
      const int at = atomicAdd(&shared.candidates, 1);
      ranks[at] = static_cast<uint64_t>(key_of(logit)) << 32 | i;
      weights[at] = weight;
    }
    __syncthreads();
    const int count = shared.candidates;
    if (threadIdx.x < count) {
      const uint64_t own = ranks[threadIdx.x];
      for (int i = 0; i < count; ++i) {
        if (ranks[i] >= own) continue;
        front.weight += weights[i];
        ++front.count;
      }
      const uint64_t low = by_count ? front.count : front.weight;
      if (low <= target && target < low + (by_count ? 1 : weights[threadIdx.x])) {
        shared.place = {static_cast<uint32_t>(own >> 32), static_cast<int>(own & 0xffffffffu),
                        front};
      }
    }
    __syncthreads();
    const Place place = shared.place;
    __syncthreads();
    return place;
  }

  // Searches by rank; shared.coarse is the histogram of the row's depths.
  __device__ static Place search(const Row& row, bool by_count, uint64_t target, Shared& shared) {
    Histogram& fine = shared.fine;
    Place place = {0, -1, {0, 0}};
    const int bucket = find(shared.coarse, by_count, target, place.before, shared);
    if (shared.coarse.count[bucket] <= kThreads) {
      return search_few(row, bucket, place.before, by_count, target, shared);
    }
    for (int shift = 21; shift >= 0; shift = shift == 21 ? 10 : shift - 10) {
      const int digit = shift == 0 ? 10 : 11;
      clear(fine);
      for (int i = threadIdx.x; i < row.vocabulary; i += kThreads) {
        const float logit = row.logits[i];
        const uint32_t key = key_of(logit);
        if (row.bucket(logit) != bucket) continue;
        if (shift + digit < 32 && key >> (shift + digit) != place.key) continue;
        const uint64_t weight = row.weight(logit);
        if (weight > 0) add(fine, key >> shift & ((1 << digit) - 1), weight);
      }
      __syncthreads();
      place.key = place.key << digit |
                  static_cast<uint32_t>(find(fine, by_count, target, place.before, shared));
    }
    return place;
  }

  // Returns token number `index` of the tokens whose logit has this key.
  __device__ static int nth_equal(const Row& row, uint32_t key, uint64_t index, Shared& shared) {
    uint64_t passed = 0;
    for (int begin = 0; begin < row.vocabulary; begin += kThreads) {
      const int i = begin + threadIdx.x;
      const bool equal = i < row.vocabulary && key_of(row.logits[i]) == key;
      const uint32_t mask = __ballot_sync(~0u, equal);
      if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32].count = __popc(mask);
      const int found = __syncthreads_count(equal);
      if (passed + found > index) {
        uint64_t rank = passed + __popc(mask & ((1u << threadIdx.x % 32) - 1));
        for (int warp = 0; warp < threadIdx.x / 32; ++warp) rank += shared.warps[warp].count;
        if (equal && rank == index) shared.bucket = i;
        __syncthreads();
        return shared.bucket;
      }
      passed += found;
      __syncthreads();
    }
    return -1;
  }

  // Returns a share of a sum, rounded as the CPU rounds the product.
  __device__ static uint64_t part_of(uint64_t sum, double share) {
    return __double2ull_rd(static_cast<double>(sum) * share);
  }

  __device__ static int draw_by_rank(const Draw& draw, const Row& row, Amount total,
                                     Shared& shared) {
    uint64_t sum = total.weight;
    if (draw.top_k > 0 && draw.top_k < total.count) {
      const Place last = search(row, true, draw.top_k - 1, shared);
      sum = last.before.weight + (draw.top_k - last.before.count) * row.weight(logit_of(last.key));
    }
    if (draw.top_p < 1) {
      // The fewest tokens that hold the share end where the sum passes one less than the share.
      const double share = static_cast<double>(sum) * static_cast<double>(draw.top_p);
      const uint64_t wanted = max(__double2ull_ru(share), 1ull);
      const Place last = search(row, false, wanted - 1, shared);
      const uint64_t weight = row.weight(logit_of(last.key));
      sum = last.before.weight + (wanted - last.before.weight + weight - 1) / weight * weight;
    }
    const uint64_t target = part_of(sum, draw.uniform);
    const Place place = search(row, false, target, shared);
    if (place.token >= 0) return place.token;
    return nth_equal(row, place.key,
                     (target - place.before.weight) / row.weight(logit_of(place.key)), shared);
  }

  // Draws by token id: a warp sums a tile of consecutive tokens into a bucket.
  __device__ static int draw_by_id(const Draw& draw, const Row& row, Shared& shared) {
    Histogram& tiles = shared.coarse;
    const int steps = (row.vocabulary + 32 * kBuckets - 1) / (32 * kBuckets);
    const int lane = threadIdx.x % 32;
    const auto weight_at = [&](int i) {
      return i < row.vocabulary ? row.weight(row.logits[i]) : 0ull;
    };
    for (int tile = threadIdx.x / 32; tile < kBuckets; tile += kWarps) {
      uint64_t sum = 0;
      for (int step = 0; step < steps; ++step) sum += weight_at((tile * steps + step) * 32 + lane);
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      if (lane == 0) tiles.weight[tile] = sum;
    }
    __syncthreads();
    const uint64_t target = part_of(scan(tiles, shared).total.weight, draw.uniform);
    Amount before = {0, 0};
    const int tile = find(tiles, false, target, before, shared);
    if (threadIdx.x < 32) {
      for (int step = 0; step < steps; ++step) {
        const int i = (tile * steps + step) * 32 + lane;
        uint64_t sum = weight_at(i);
        for (int up = 1; up < 32; up *= 2) {
          const uint64_t lower = __shfl_up_sync(~0u, sum, up);
          if (lane >= up) sum += lower;
        }
        const uint32_t passed = __ballot_sync(~0u, before.weight + sum > target);
        if (passed != 0) {
          if (lane == __ffs(passed) - 1) shared.bucket = i;
          break;
        }
        before.weight += __shfl_sync(~0u, sum, 31);
      }
    }
    __syncthreads();
    return shared.bucket;
  }

  __device__ static void run(const Params& params) {
    extern __shared__ __align__(16) char dynamic_shared[];
    auto& shared = *reinterpret_cast<Shared*>(dynamic_shared);
    const Draw draw = params.draws[blockIdx.x];
    if (draw.row < 0) return;
    float* const logits = params.logits + draw.row * params.stride;
    if (draw.mask >= 0) forbid(params, draw, logits);
    int token = find_largest(params, logits, shared);
    if (token >= 0 && params.likeliest_count > 0) {
      find_likeliest(params, logits, logits[token],
                     params.likeliest + int64_t{blockIdx.x} * params.likeliest_count, shared);
    }
    if (token >= 0 && draw.temperature != 0) {
      const Row row = {logits, params.vocabulary, static_cast<double>(logits[token]),
                       1.0 / static_cast<double>(draw.temperature),
                       static_cast<double>(draw.min_p)};
      if (threadIdx.x == 0) shared.candidates = 0;
      clear(shared.coarse);
      int candidates = 0;
      for (int i = threadIdx.x; i < row.vocabulary; i += kThreads) {
        const float logit = logits[i];
        candidates += row.share(logit) > 0;
        const uint64_t weight = row.weight(logit);
        if (weight > 0) add(shared.coarse, row.bucket(logit), weight);
      }
      atomicAdd(&shared.candidates, candidates);
      __syncthreads();
      const Amount total = scan(shared.coarse, shared).total;
      const bool sorted = draw.top_p < 1 || (draw.top_k > 0 && draw.top_k < shared.candidates);
      if (sorted) {
        token = draw_by_rank(draw, row, total, shared);
      } else {
        clear(shared.coarse);
        token = draw_by_id(draw, row, shared);
      }
    }
    if (threadIdx.x == 0) params.tokens[blockIdx.x] = token;
  }
};

template <int kThreads>
using Config = SamplingConfig<kThreads>;

}  // namespace fovea::kernels::cuda
