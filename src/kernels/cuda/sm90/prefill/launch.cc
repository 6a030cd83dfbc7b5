// SPDX-License-Identifier: Apache-2.0
// Order once per pass, prefill once per layer.
#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/sm90/few_rows/few_rows.h"
#include "kernels/cuda/sm90/prefill/split_keys.h"

namespace fovea::kernels::cuda {
namespace {

using namespace prefill;

constexpr int32_t kMinRowTile = 128;
constexpr int32_t kMinSegmentKeys = kSegmentKeys - 128;  // key tiles have up to 128 keys
// Blocks of a cluster, which take neighbouring row tiles as one and read their keys once.
constexpr int32_t kPair = 2;
// Pairs whose q heads share no keys pay from so many key tiles on; with as many kv heads as q heads
// from so many tokens on, where key tiles pass blocks or consumers by which see little of them.
constexpr int32_t kMinPairedTiles = 64;
constexpr int32_t kMinPassingTokens = 1024;
// Pairs cut no row tiles: where keys are summed in segments, only batches of so many tokens a
// request.
constexpr int32_t kMinPairedTokens = 512;

struct Buffers {
  PrefillOrder* order;
  PrefillTile* tiles;
  SegmentBuffers segments;
  WorkList split;  // where keys may be split
};

// (token, segment) pairs whose partial results a pass may keep; what finds no room is not cut.
constexpr int64_t kMaxPartials = 2048;

int64_t most_partials(const AttentionSetup& setup, const BatchLimits& limits) {
  if (!sums_segments(setup)) return 0;
  const int64_t segments =
      std::max(limits.max_kv_len, limits.max_encoder_len) / kMinSegmentKeys + 1;
  return std::min(segments * limits.max_tokens, kMaxPartials);
}

Buffers carve(WorkspaceCarver& workspace, const AttentionSetup& setup, const BatchLimits& limits) {
  // Every request with tokens adds less than one tile to the batch's tokens / tokens_per_tile.
  const int64_t tokens = kMinRowTile >> heads_shift(setup.spec);
  const int64_t filled = std::min(limits.max_requests, limits.max_tokens);
  Buffers buffers{};
  buffers.order = workspace.take<PrefillOrder>(1);
  const int64_t partials = most_partials(setup, limits);
  const int64_t tiles = (limits.max_tokens + filled * (tokens - 1)) / tokens + partials;
  buffers.tiles = workspace.take<PrefillTile>(tiles);
  if (!SplitKeys::variants(setup).empty())
    buffers.split = SplitKeys::carve(workspace, setup, limits);
  if (!sums_segments(setup)) return buffers;
  const AttentionSpec& spec = setup.spec;
  const int64_t width = spec.head_dim_v <= 64 && spec.head_dim <= 64 ? 64 : 128;  // of the variant
  SegmentBuffers& segments = buffers.segments;
  segments.tiles = workspace.take<TileSegments>(tiles);
  segments.out = workspace.take<float>(partials * spec.q_heads * width);
  segments.sums = workspace.take<RowSums>(partials * spec.q_heads);
  segments.stored = workspace.take<int32_t>(static_cast<int64_t>(limits.max_requests) *
                                            (spec.q_heads >> heads_shift(spec)));
  return buffers;
}

size_t workspace_bytes(const AttentionSetup& setup, const BatchLimits& limits) {
  WorkspaceCarver counter(nullptr);
  carve(counter, setup, limits);
  return counter.bytes();
}

class HopperPrefill final : public AttentionKernel {
 public:
  HopperPrefill(const AttentionSetup& setup, const Variants& variants, gpu::KernelStore& store)
      : setup_(setup), order_(variants.order, store) {
    const auto load = [&](std::optional<PrefillKernel>& to, const auto& variant, int32_t row_tile) {
      if (variant) to.emplace(setup, *variant, row_tile, store);
    };
    load(plain_, variants.plain, kMinRowTile);
    load(general_, variants.general, kMinRowTile);
    // A request of theirs has one tile, as it would with tiles of kMinRowTile.
    load(few_plain_, variants.few_plain, kGroupRows);
    load(few_general_, variants.few_general, kGroupRows);
    load(few_whole_, variants.few_whole, kGroupRows);
    if (!variants.few_rows.empty()) few_rows_.emplace(setup, store);
    if (!SplitKeys::variants(setup).empty()) split_.emplace(setup, store);
    for (const auto& [pairs, variant] : {std::pair(&pairs_, &variants.pairs),
                                         std::pair(&general_pairs_, &variants.general_pairs)}) {
      load(*pairs, *variant, kPair * kMinRowTile);
      // Every multiprocessor must have a partner.
      if (*pairs && (*pairs)->kernel().active_clusters(kPair) * kPair < setup.multiprocessors) {
        pairs->reset();
      }
    }
    params_.heads_shift = heads_shift(setup.spec);
    if (setup.spec.scores.logit_cap > 0) params_.cap = near_cap(setup.spec.scores.logit_cap);
  }

  void reserve(const BatchLimits& limits, std::byte* workspace) override {
    WorkspaceCarver carver(workspace);
    buffers_ = carve(carver, setup_, limits);
    most_partials_ = static_cast<int32_t>(most_partials(setup_, limits));
    max_kv_len_ = longest_ = limits.max_kv_len;
    if (split_) split_->reserve(buffers_.split, limits);
    params_.order = buffers_.order;
    params_.segments = buffers_.segments;
  }

  void share_keys(const void* rows, int64_t row_stride) override {
    shared_keys_ = {rows, row_stride};
    if (split_) split_->share_keys(shared_keys_);
  }

  void expect_keys(const ExpectedKeys& keys) override {
    prefix_settled_ = keys.prefix_settled;
    params_.keys_last = keys.come_last;
    requests_ = keys.requests;
    longest_ = keys.max_kv_len > 0 ? keys.max_kv_len : max_kv_len_;
  }

  bool outruns_decode(const BatchParams& batch) const override {
    return split_ && split_->outruns_decode(batch);
  }

  void plan(const BatchParams& given, int32_t tokens, PassPlan& pass) override {
    const AttentionSpec& spec = setup_.spec;
    const BatchParams batch = without_idle_positions(given);
    tokens_ = tokens;
    params_.list_settled = params_.keys_settled = 0;
    params_.beside = batch.max_planned_q_len > 0;
    splits_ = split_ && !pass.has_prefixes() &&
              split_->plan(batch, tokens, keyed_requests(batch), longest_, pass);
    if (splits_) return;
    const bool plain = plain_ && batch.mask.positions == nullptr;
    active_ = plain ? &*plain_ : &*general_;
    if (sums_segments(setup_) && batch.max_q_len > 0 &&
        batch.max_q_len <= kGroupRows >> params_.heads_shift) {
      active_ = plain ? &*few_plain_ : &*few_general_;
    }
    if (few_whole_ && plain && half_tiles(batch) <= setup_.multiprocessors) {
      active_ = &*few_whole_;
    }
    launch_ = {active_, 1, setup_.multiprocessors};
    const bool has_few_rows =
        batch.max_q_len > 0 && batch.max_q_len << params_.heads_shift <= few_rows::kMaxRows;
    if (few_rows_ && plain && has_few_rows) {
      launch_ = few_rows_->choose(batch.requests, batch.q_heads >> params_.heads_shift, longest_);
      active_ = launch_.kernel;
    }
    const std::optional<PrefillKernel>& pairs = plain ? pairs_ : general_pairs_;
    if (in_pairs(pairs, batch)) {
      active_ = &*pairs;
      launch_ = {active_, kPair, setup_.multiprocessors / kPair * kPair};
    }
    pass.add(order_, PrefillOrderParams{
                         .batch = batch,
                         .order = buffers_.order,
                         .tiles = buffers_.tiles,
                         .tokens_per_tile = active_->kernel().row_tile() >> params_.heads_shift,
                         .heads_shift = params_.heads_shift,
                         .token_bytes = static_cast<int32_t>(
                             bytes_of(spec.head_dim + spec.head_dim_v, stored(setup_))),
                         .segments = buffers_.segments,
                         .segment_keys = active_->segment_keys(),
                         .most_partials = in_use(pairs_) ? 0 : most_partials_,
                         .blocks = launch_.blocks});
  }

  void attend(const AttentionParams& given, int32_t layer, Stream stream) override {
    const AttentionSpec& spec = setup_.spec;
    params_.attention = given;
    params_.attention.batch = without_idle_positions(given.batch);
    if (splits_) return split_->attend(params_.attention, layer, stream);
    params_.box_keys = active_->box_keys();
    const int32_t q_heads = given.batch.q_heads, shift = params_.heads_shift;
    maps_.q.encode(row_map(q_heads, shift, tokens_, given.q, spec.q_dtype, spec.head_dim,
                           given.q_head_stride, given.q_token_stride),
                   &params_.q);
    maps_.out.encode(row_map(q_heads, shift, tokens_, given.out, activation_dtype(spec),
                             spec.head_dim_v, given.out_head_stride, given.out_token_stride),
                     &params_.out);
    if (gathers(setup_)) {
      // Rows are found through given.keys.
    } else if (cached(spec)) {
      params_.k = active_->k(layer);
      params_.v = active_->v(layer);
    } else {
      packed_.encode(setup_, shared_keys_, tokens_, params_);
    }
    const GridSize grid{static_cast<uint32_t>(launch_.blocks)};
    active_->kernel().launch_overlapped(grid, params_, stream,
                                        static_cast<uint32_t>(launch_.cluster));
    params_.list_settled = 1;
    params_.keys_settled = prefix_settled_;
  }

 private:
  // New tokens of a request at most.
  int32_t longest(const BatchParams& batch) const {
    return batch.max_q_len > 0 ? batch.max_q_len : tokens_;
  }
  int32_t keyed_requests(const BatchParams& batch) const {
    return requests_ > 0 ? requests_ : batch.requests;
  }

  // Of the planned pass.
  bool in_use(const std::optional<PrefillKernel>& kernel) const {
    return kernel && active_ == &*kernel;
  }
  // Pairs are 3 to 4 % faster where q heads share keys. Else their rows are 256 tokens: 32/32 heads
  // at 16x1k, 8x2k, 4x4k reach 516, 621, 678 TFLOP/s in single blocks, 496, 617, 688 in pairs, 528,
  // 641, 702 in those that pass, but 8/8 at 1x4k, a row tile for each block, 446 instead of 459
  // (head dim 128, H200, 2026-11-22); head dim 256 16x1k, 8x2k 542, 647 in single blocks, 551, 671
  // in pairs; 192/128 with 16 heads 4x4k, 2x8k, 1x16k 710, 770, 797 and 691, 763, 828 (2026-11-23).
  // Beside another kernel blocks begin as single SMs fall free.
  bool in_pairs(const std::optional<PrefillKernel>& pairs, const BatchParams& batch) const {
    if (!pairs || params_.beside) return false;
    if (sums_segments(setup_) && tokens_ / kMinPairedTokens < batch.requests) return false;
    const int32_t longest = this->longest(batch);
    if (&pairs == &general_pairs_ && longest << params_.heads_shift <= kMinRowTile) return false;
    const auto& [q_heads, kv_heads] = std::pair(batch.q_heads, batch.kv_heads);
    const int32_t key_tile = active_->kernel().key_tile();
    const bool passing = &pairs == &pairs_ && q_heads == kv_heads &&
                         (pairs_pass(setup_) || key_tile == kGroupRows) &&
                         tokens_ / (kPair * kMinRowTile) * q_heads >= setup_.multiprocessors;
    const bool is_latent = setup_.spec.head_dim > 128 && key_tile > kGroupRows;  // 192/128
    const int32_t least = is_latent ? 2 * kMinPairedTiles : kMinPairedTiles;
    return params_.heads_shift > 0 || (passing && longest >= kMinPassingTokens) ||
           longest / key_tile >= least;
  }

  // Row tiles of 64 rows, at most.
  int64_t half_tiles(const BatchParams& batch) const {
    const int64_t tokens = kGroupRows >> params_.heads_shift;
    return keyed_requests(batch) * ceil_div(int64_t{longest(batch)}, tokens) *
           (batch.q_heads >> params_.heads_shift);
  }

  BatchParams without_idle_positions(BatchParams batch) const {
    if (!measures_positions(setup_.spec)) batch.mask.positions = nullptr;
    return batch;
  }

  AttentionSetup setup_;
  Kernel order_;
  std::optional<PrefillKernel> plain_, general_, few_plain_, few_general_, few_whole_, pairs_,
      general_pairs_;
  std::optional<few_rows::FewRows> few_rows_;
  std::optional<SplitKeys> split_;
  Buffers buffers_{};
  SharedKeys shared_keys_;
  PackedKeys packed_;
  bool splits_ = false;                    // the planned one
  const PrefillKernel* active_ = nullptr;  // of the planned pass
  Launch launch_;                          // its launch
  int32_t tokens_ = 0;                     // of the planned pass at most
  int32_t most_partials_ = 0;
  bool prefix_settled_ = false;
  int32_t max_kv_len_ = 1;
  int32_t requests_ = 0;    // of the planned batch that have keys, at most; 0: all
  int32_t longest_ = 1;     // keys of a request of the planned batch, at most
  PrefillParams params_{};  // what layers share; attend() adds the rest
  struct {
    gpu::RepeatedTensorMap q, out;
  } maps_;
};

std::vector<gpu::KernelVariant> all_variants(const AttentionSetup& setup) {
  std::vector<gpu::KernelVariant> all = variants(setup);
  if (all.empty()) return all;
  const std::vector<gpu::KernelVariant> split = SplitKeys::variants(setup);
  all.insert(all.end(), split.begin(), split.end());
  return all;
}

std::unique_ptr<AttentionKernel> load(const AttentionSetup& setup, gpu::KernelStore& store) {
  const auto found = find_variants(setup);
  check_argument(found.has_value(), "{} has no variant for these layers", kFolder);
  return std::make_unique<HopperPrefill>(setup, *found, store);
}

}  // namespace

const AttentionFamily& hopper_prefill() {
  static constexpr AttentionFamily kFamily = {.folder = kFolder,
                                              .row_tile = kMinRowTile,
                                              .variants = all_variants,
                                              .workspace_bytes = workspace_bytes,
                                              .load = load};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
