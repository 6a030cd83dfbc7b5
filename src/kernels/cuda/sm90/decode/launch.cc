// SPDX-License-Identifier: Apache-2.0
// Plan once per pass, attention once per layer; parts of a tile are joined inside the attention
// kernel.
#include <algorithm>
#include <numeric>

#include "core/check.h"
#include "gpu/architectures.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr std::string_view kFolder = "sm90/decode";
// Rows of a tile, smallest first; the batch's longest request decides which one a pass uses.
constexpr int32_t kRowTiles[] = {8, 16};
constexpr int32_t kMaxRows = 32;  // two tiles of 16: the second finds the keys in L2
constexpr int32_t kMaxHeadDim = 256;
// Wider heads leave no registers for 16 rows of accumulators.
constexpr int32_t kMaxDimsOf16Rows = 320;
constexpr int32_t kGrain = 16;              // keys
constexpr const char* kPlanOverhead = "4";  // of an item, in grains

// Fewer keys than all warps take in one step are not worth a CTA: in units of the plan's grain.
constexpr int32_t kMinUnits = 8;
// Parts of a cluster are faster than more of them that meet through memory up to so many elements
// of keys and values each where half of the CTAs have one, up to more with more CTAs: most of them
// are copied while the kernel before ends, if they are settled. 1 x 4k takes 7.5 us instead of 8.9,
// 6 x 1k 8.5 instead of 12.8, but e4m3 at 1 x 8k 11.2 instead of 10.5 (H200, 2026-11-23).
constexpr int32_t kClusterPartElements = 136 * 1024;
// CTAs of a cluster, so that few are left without work: of 3 39 fit an H200.
constexpr int32_t kClusterSizes[] = {2, 3, 4, 6, 8};
// Of the plan: each finds the whole line, they share the writing.
constexpr uint32_t kPlanCtas = 4;
static_assert(kPlanCtas + 1 + kPrefixLevels <= kMaxPlanBlocks);  // with prefill's and groups'
// Keys of a box of the bulk copy engine, whose rows are 64 elements of 16 bits.
constexpr int32_t kBoxKeys = 16;
constexpr uint32_t kBoxColumns = 64;

struct Variant {
  int32_t row_tile;
  int32_t max_heads;  // of an item
  gpu::KernelVariant plan, attention;
};

bool cached(const AttentionSpec& spec) { return !is_packed(spec.scope); }

std::vector<Variant> find_variants(const AttentionSetup& setup) {
  const AttentionSpec& spec = setup.spec;
  const auto q = variant_type(spec.q_dtype);
  const DType stored = cached(spec) ? setup.cache.dtype : spec.q_dtype;
  const auto kv = variant_type(stored);
  const bool types = q && kv && !is_fp8(spec.q_dtype) && (stored == spec.q_dtype || is_fp8(stored));
  if (setup.sm != gpu::kHopper || !types || std::max(spec.head_dim, spec.head_dim_v) > kMaxHeadDim)
    return {};
  std::vector<Variant> found;
  for (const int32_t row_tile : kRowTiles) {
    const std::string rows = std::to_string(row_tile);
    // The kernel's rows of K are no shorter than those of V: what they lack is read as zeros.
    const auto values = fitting_values(kFolder, std::max(spec.head_dim, spec.head_dim_v),
                                       spec.head_dim_v, {rows, *q, *kv});
    const int32_t head_dim = std::stoi(values[0]), head_dim_v = std::stoi(values[1]);
    if (row_tile > kRowTiles[0] && head_dim + head_dim_v > kMaxDimsOf16Rows) continue;
    found.push_back({row_tile,
                     std::gcd(decode_warps(head_dim, head_dim_v, row_tile), spec.kv_heads),
                     make_variant(family("sm90/decode_plan"),
                                  {rows, std::to_string(kGrain), kPlanOverhead}, setup.sm),
                     make_variant(family(kFolder), values, setup.sm)});
  }
  return found;
}

std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup) {
  std::vector<gpu::KernelVariant> all;
  for (const Variant& variant : find_variants(setup)) {
    all.push_back(variant.plan);
    all.push_back(variant.attention);
  }
  return all;
}

// Against prefill: a key of one head is read at 4.2 TB/s, a (token, key) pair of all heads computed
// at 650 TFLOP/s (H200, 2026-11-21).
float pairs_per_unit(const AttentionSetup& setup) {
  constexpr float kFlopsPerByte = 650.0f / 4.2f;
  const DType stored = cached(setup.spec) ? setup.cache.dtype : setup.spec.q_dtype;
  return static_cast<float>(kGrain) * static_cast<float>(dtype_bytes(stored)) * kFlopsPerByte /
         static_cast<float>(2 * setup.spec.q_heads);
}

DecodeWork carve(std::byte* workspace, const AttentionSetup& setup, const BatchLimits& limits,
                 const Variant& variant, size_t& bytes) {
  WorkspaceCarver carver(workspace);
  const AttentionSpec& spec = setup.spec;
  const int64_t ctas = setup.multiprocessors;
  const int64_t partial_rows = 2 * ctas * variant.max_heads * variant.row_tile;
  DecodeWork list{};
  list.items =
      carver.take<DecodeItem>(most_tiles(spec, limits, variant.row_tile) * spec.kv_heads + ctas);
  list.ranges = carver.take<DecodeRange>(ctas);
  list.partial_out = carver.take<float>(partial_rows * spec.head_dim_v);
  list.partial_lse = carver.take<float>(partial_rows);
  list.tickets = carver.take<int32_t>(2 * ctas);
  list.ctas = static_cast<int32_t>(ctas);
  list.cluster = 1;
  list.max_heads = variant.max_heads;
  list.least_units = kMinUnits;
  bytes = std::max(bytes, carver.bytes());
  return list;
}

size_t workspace_bytes(const AttentionSetup& setup, const BatchLimits& limits) {
  // One plan is valid at a time, so the lists share their bytes.
  size_t bytes = 0;
  for (const Variant& variant : find_variants(setup)) {
    carve(nullptr, setup, limits, variant, bytes);
  }
  return bytes;
}

// One side of a layer's cache, [page, place, kv head, dim], in units of 16 bits.
TensorMap cache_map(const void* data, int64_t dim, int64_t page_stride, int64_t token_stride,
                    int64_t head_stride, int32_t kv_heads, const KvLayerView& view) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(view.dtype));
  gpu::TensorMapSpec spec;
  spec.data = data;
  spec.sizes = {static_cast<uint64_t>(dim * bytes / 2), static_cast<uint64_t>(kv_heads),
                static_cast<uint64_t>(view.page_size),
                static_cast<uint64_t>(view.slots / view.page_size)};
  spec.strides = {static_cast<uint64_t>(head_stride * bytes),
                  static_cast<uint64_t>(token_stride * bytes),
                  static_cast<uint64_t>(page_stride * bytes)};
  spec.box = {kBoxColumns, 1, kBoxKeys, 1};
  TensorMap map;
  gpu::encode_tensor_map(spec, &map);
  return map;
}

class HopperDecode final : public AttentionKernel {
 public:
  HopperDecode(const AttentionSetup& setup, gpu::KernelStore& store)
      : setup_(setup),
        group_(setup.spec.q_heads / setup.spec.kv_heads),
        cluster_part_keys_(kClusterPartElements / (setup.spec.head_dim + setup.spec.head_dim_v)),
        pairs_per_unit_(pairs_per_unit(setup)) {
    for (Variant& variant : find_variants(setup)) {
      Kernel plan(variant.plan, store), attention(variant.attention, store);
      check_argument(attention.row_tile() == variant.row_tile,
                     "{} has row tiles of {}, its plan {}", variant.attention.name,
                     attention.row_tile(), variant.row_tile);
      loaded_.push_back({std::move(variant), std::move(plan), std::move(attention), {}, {}});
      for (const int32_t size : kClusterSizes) {
        loaded_.back().clusters.push_back(
            {size, loaded_.back().attention.active_clusters(static_cast<uint32_t>(size)) * size});
      }
    }
    check_argument(!loaded_.empty(), "{} has no variant for these layers", kFolder);
    if (!cached(setup.spec) || setup.cache.page_size % kBoxKeys != 0) return;
    for (const KvLayerView& view : setup.layers) {
      const AttentionSpec& spec = setup.spec;
      maps_.push_back({cache_map(view.k, spec.head_dim, view.k_page_stride, view.k_token_stride,
                                 view.k_head_stride, spec.kv_heads, view),
                       cache_map(view.v, spec.head_dim_v, view.v_page_stride, view.v_token_stride,
                                 view.v_head_stride, spec.kv_heads, view)});
    }
  }

  void reserve(const BatchLimits& limits, std::byte* workspace) override {
    size_t bytes = 0;
    for (Loaded& loaded : loaded_)
      loaded.list = carve(workspace, setup_, limits, loaded.variant, bytes);
    max_q_len_ = limits.max_q_len;
    max_kv_len_ = longest_ = limits.max_kv_len;
  }

  void expect_keys(const ExpectedKeys& keys) override {
    prefix_settled_ = keys.prefix_settled;
    longest_ = keys.max_kv_len > 0 ? keys.max_kv_len : max_kv_len_;
  }

  // Host figures choose the row tile, so that a captured pass keeps its kernels.
  void plan(const BatchParams& batch, int32_t, PassPlan& pass) override {
    const int64_t most_rows = rows(batch);
    active_ = &loaded_.back();
    for (const Loaded& loaded : loaded_) {
      if (most_rows > loaded.variant.row_tile) continue;
      active_ = &loaded;
      break;
    }
    list_ = active_->list;
    list_settled_ = false;
    if (most_rows <= active_->variant.row_tile) {
      choose_cluster(*active_, batch.requests, most_keys(batch.mask, most_tokens(batch)));
    }
    pass.add(active_->plan, kPlanCtas,
             DecodePlanParams{batch, list_, setup_.multiprocessors / 2, pairs_per_unit_});
  }

  // In a mixed batch prefill begins as soon as every block here has waited for what came before.
  void attend(const AttentionParams& given, int32_t layer, Stream stream) override {
    DecodeParams params{
        given, list_, list_settled_, list_settled_ && prefix_settled_, !maps_.empty(), {}, {}};
    list_settled_ = true;
    if (params.boxes) {
      params.k_map = maps_[static_cast<size_t>(layer)].k;
      params.v_map = maps_[static_cast<size_t>(layer)].v;
    }
    active_->attention.launch_overlapped({static_cast<uint32_t>(list_.ctas)}, params, stream,
                                         static_cast<uint32_t>(list_.cluster));
  }

 private:
  struct Clusters {
    int32_t size;
    int32_t ctas;  // in all clusters that run at the same time
  };
  struct Loaded {
    Variant variant;
    Kernel plan, attention;
    DecodeWork list;
    std::vector<Clusters> clusters;  // by size
  };

  // Of a request: new tokens, and packed rows.
  int32_t most_tokens(const BatchParams& batch) const {
    return batch.max_q_len > 0 ? batch.max_q_len : max_q_len_;
  }
  int64_t rows(const BatchParams& batch) const { return int64_t{most_tokens(batch)} * group_; }

  // That so many new tokens of a request can see.
  int64_t most_keys(const MaskParams& mask, int32_t tokens) const {
    int64_t keys = longest_;
    for (const int32_t reach : {mask.window, mask.chunk}) {
      if (reach > 0 && !mask.positions) keys = std::min<int64_t>(keys, reach + tokens - 1);
    }
    return keys;
  }

  // For requests of one tile a head: clusters as large as the CTAs that each can have, unless about
  // half of the CTAs suffice, which leave room for those of the next kernel. If they are few beside
  // those that the longest requests keep busy the plan would not use them, but lack the
  // multiprocessors that no cluster fits on.
  void choose_cluster(const Loaded& loaded, int32_t requests, int64_t keys) {
    const int64_t tiles = int64_t{requests} * setup_.spec.kv_heads;
    const int64_t all = setup_.multiprocessors;
    const int64_t busy = std::min<int64_t>(tiles * (keys / kGrain) / kMinUnits, all);
    for (const Clusters& clusters : loaded.clusters) {
      const int32_t ctas = std::min(clusters.ctas, setup_.multiprocessors);
      const int64_t used = clusters.size * tiles;
      const int64_t part_keys =
          prefix_settled_ ? cluster_part_keys_ * std::max(2 * used, all) / all : 0;
      const bool are_short = keys <= clusters.size * part_keys;
      if (used > ctas || (4 * used < 3 * busy && !are_short)) continue;
      list_.cluster = clusters.size;
      list_.ctas = ctas;
      list_.cluster_part_units = static_cast<int32_t>(part_keys / kGrain);
      if (are_short && 9 * used >= 4 * all) break;
    }
  }

  struct LayerMaps {
    TensorMap k, v;
  };

  AttentionSetup setup_;
  int32_t group_;
  int32_t cluster_part_keys_;
  float pairs_per_unit_;
  int32_t max_q_len_ = 1;
  int32_t max_kv_len_ = 1;
  int32_t longest_ = 1;          // keys of a request of the batch planned next, at most
  std::vector<LayerMaps> maps_;  // empty: keys are copied row by row
  std::vector<Loaded> loaded_;
  const Loaded* active_ = nullptr;  // of the planned batch
  DecodeWork list_{};
  bool list_settled_ = false;
  bool prefix_settled_ = false;
};

std::unique_ptr<AttentionKernel> load(const AttentionSetup& setup, gpu::KernelStore& store) {
  return std::make_unique<HopperDecode>(setup, store);
}

}  // namespace

const AttentionFamily& hopper_decode() {
  static constexpr AttentionFamily kFamily = {.folder = kFolder,
                                              .row_tile = kMaxRows,
                                              .variants = variants,
                                              .workspace_bytes = workspace_bytes,
                                              .load = load};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
