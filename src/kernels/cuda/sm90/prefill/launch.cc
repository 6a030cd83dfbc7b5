// SPDX-License-Identifier: Apache-2.0
// The order of row tiles is planned once per pass, prefill runs once per layer. choose.h decides
// which kernel that is.
#include <algorithm>
#include <array>
#include <optional>

#include "core/check.h"
#include "kernels/cuda/sm90/bounds.h"
#include "kernels/cuda/sm90/few_rows/few_rows.h"
#include "kernels/cuda/sm90/prefill/split_keys.h"

namespace fovea::kernels::cuda {
namespace {

using namespace prefill;

constexpr int32_t kMinRowTile = 128;
constexpr int32_t kMinSegmentKeys = kSegmentKeys - 128;  // key tiles have up to 128 keys
// Blocks of a cluster that take neighbouring row tiles as one and read their keys once.
constexpr int32_t kPair = 2;

struct Buffers {
  PrefillOrder* order;
  PrefillTile* tiles;
  SegmentBuffers segments;
  WorkList split;  // if keys may be split
};

// (token, segment) pairs whose partial results a pass may keep. Further tiles are not cut.
constexpr int64_t kMaxPartials = 2048;

int64_t max_partials(const AttentionSetup& setup, const BatchLimits& limits) {
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
  const int64_t partials = max_partials(setup, limits);
  const int64_t tiles = (limits.max_tokens + filled * (tokens - 1)) / tokens + partials;
  buffers.tiles = workspace.take<PrefillTile>(tiles);
  if (!SplitKeys::variants(setup).empty())
    buffers.split = SplitKeys::carve(workspace, setup, limits);
  if (!sums_segments(setup)) return buffers;
  const AttentionSpec& spec = setup.spec;
  const int64_t width = spec.head_dim_v <= 64 && spec.head_dim <= 64 ? 64 : 128;  // the variant's
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
      : setup_(setup), order_(variants.order, store), forms_(forms_of(setup)) {
    using enum hopper::PrefillForm;
    const auto load = [&](hopper::PrefillForm form, const auto& variant, int32_t row_tile) {
      if (variant) kernel(form).emplace(setup, *variant, row_tile, store);
    };
    load(plain, variants.plain, kMinRowTile);
    load(general, variants.general, kMinRowTile);
    // A request of these has one tile, as it would with tiles of kMinRowTile.
    load(few_plain, variants.few_plain, kGroupRows);
    load(few_general, variants.few_general, kGroupRows);
    load(few_whole, variants.few_whole, kGroupRows);
    load(pairs, variants.pairs, kPair * kMinRowTile);
    load(general_pairs, variants.general_pairs, kPair * kMinRowTile);
    for (const hopper::PrefillForm form : {pairs, general_pairs}) {
      std::optional<PrefillKernel>& paired = kernel(form);
      // Every multiprocessor must have a partner.
      if (paired && paired->kernel().active_clusters(kPair) * kPair < setup.multiprocessors) {
        paired.reset();
      }
    }
    if (!variants.few_rows.empty()) few_rows_.emplace(setup, store);
    if (!SplitKeys::variants(setup).empty()) split_.emplace(setup, store);
    params_.heads_shift = heads_shift(setup.spec);
    if (setup.spec.scores.logit_cap > 0) params_.cap = near_cap(setup.spec.scores.logit_cap);
    list_forms();
  }

  void reserve(const BatchLimits& limits, std::byte* workspace) override {
    WorkspaceCarver carver(workspace);
    buffers_ = carve(carver, setup_, limits);
    limits_ = limits;
    max_partials_ = static_cast<int32_t>(max_partials(setup_, limits));
    if (split_) split_->reserve(buffers_.split);
    params_.order = buffers_.order;
    params_.segments = buffers_.segments;
  }

  void plan(const PlanRequest& given, PlanQueue& plans) override {
    PlanRequest request = given;
    request.batch = without_idle_positions(given.batch);
    tokens_ = request.tokens;
    prefix_written_ = request.keys.prefix_written;
    shared_keys_ = request.shared_keys;
    params_.keys_last = request.keys.written_last;
    params_.list_written = params_.keys_written = 0;
    params_.concurrent = request.role == PassRole::concurrent;
    hopper::BatchBounds bounds = hopper::bounds_of(request, limits_);
    splits_ = split_ && !plans.has_prefixes() && split_->plan(request, bounds, plans);
    if (splits_) return;
    const bool q_len_known = request.batch.max_q_len > 0;
    if (!q_len_known) bounds.q_len = request.tokens;
    const hopper::PrefillForm form = hopper::choose_prefill(forms_, bounds, q_len_known);
    launch_ = form == hopper::PrefillForm::few_rows
                  ? few_rows_->choose(bounds, bounds.q_heads >> params_.heads_shift)
                  : launch_of(form);
    add_order(request.batch, form, plans);
  }

  void attend(const AttentionParams& given, int32_t layer, gpu::Launcher launcher) override {
    const AttentionSpec& spec = setup_.spec;
    params_.attention = given;
    params_.attention.batch = without_idle_positions(given.batch);
    if (splits_) return split_->attend(params_.attention, layer, launcher);
    const PrefillKernel& active = *launch_.kernel;
    params_.box_keys = active.box_keys();
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
      params_.k = active.k(layer);
      params_.v = active.v(layer);
    } else {
      packed_.encode(setup_, shared_keys_, tokens_, params_);
    }
    active.kernel().launch({static_cast<uint32_t>(launch_.blocks)}, params_, launcher,
                           {.overlapped = true, .cluster = static_cast<uint32_t>(launch_.cluster)});
    params_.list_written = 1;
    params_.keys_written = prefix_written_;
  }

 private:
  std::optional<PrefillKernel>& kernel(hopper::PrefillForm form) {
    return kernels_[static_cast<size_t>(form)];
  }

  // Tells the choice which kernels there are.
  void list_forms() {
    for (size_t i = 0; i < kernels_.size(); ++i) {
      if (kernels_[i]) forms_.key_tiles[i] = kernels_[i]->kernel().key_tile();
    }
    if (few_rows_) {
      forms_.key_tiles[static_cast<size_t>(hopper::PrefillForm::few_rows)] = few_rows_->key_tile();
    }
  }

  Launch launch_of(hopper::PrefillForm form) const {
    using enum hopper::PrefillForm;
    const int32_t cluster = form == pairs || form == general_pairs ? kPair : 1;
    return {&*kernels_[static_cast<size_t>(form)], cluster,
            setup_.multiprocessors / cluster * cluster};
  }

  void add_order(const BatchParams& batch, hopper::PrefillForm form, PlanQueue& plans) const {
    const AttentionSpec& spec = setup_.spec;
    const PrefillKernel& active = *launch_.kernel;
    // Pairs cut no row tiles.
    const int32_t partials = form == hopper::PrefillForm::pairs ? 0 : max_partials_;
    plans.add(order_, PrefillOrderParams{
                          .batch = batch,
                          .order = buffers_.order,
                          .tiles = buffers_.tiles,
                          .tokens_per_tile = active.kernel().row_tile() >> params_.heads_shift,
                          .heads_shift = params_.heads_shift,
                          .token_bytes = static_cast<int32_t>(
                              bytes_of(spec.head_dim + spec.head_dim_v, stored(setup_))),
                          .segments = buffers_.segments,
                          .segment_keys = active.segment_keys(),
                          .max_partials = partials,
                          .blocks = launch_.blocks});
  }

  BatchParams without_idle_positions(BatchParams batch) const {
    if (!measures_positions(setup_.spec)) batch.mask.positions = nullptr;
    return batch;
  }

  AttentionSetup setup_;
  Kernel order_;
  std::array<std::optional<PrefillKernel>, hopper::kPrefillForms> kernels_;  // by form
  std::optional<few_rows::FewRows> few_rows_;
  std::optional<SplitKeys> split_;
  hopper::PrefillForms forms_;
  BatchLimits limits_;
  Buffers buffers_{};
  int32_t max_partials_ = 0;
  PackedKeys packed_;
  // The planned pass:
  bool splits_ = false;
  Launch launch_;       // unless it splits keys
  int32_t tokens_ = 0;  // at most
  SharedKeys shared_keys_;
  bool prefix_written_ = false;
  PrefillParams params_{};  // shared by layers; attend() adds the rest
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

int32_t hopper_max_decode_rows(const AttentionSetup& setup) {
  return SplitKeys::max_decode_rows(setup);
}

const AttentionFamily& hopper_prefill() {
  static constexpr AttentionFamily kFamily = {.folder = kFolder,
                                              .row_tile = kMinRowTile,
                                              .variants = all_variants,
                                              .workspace_bytes = workspace_bytes,
                                              .load = load};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
