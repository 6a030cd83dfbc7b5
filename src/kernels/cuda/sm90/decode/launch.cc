// SPDX-License-Identifier: Apache-2.0
// The plan runs once per pass, attention once per layer. The attention kernel itself joins the
// parts of a tile.
#include "kernels/cuda/sm90/decode_plan/launch.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "gpu/architectures.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/common/decode_params.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/sm90/bounds.h"

namespace fovea::kernels::cuda {
namespace {

constexpr std::string_view kFolder = "sm90/decode";
// Rows of a tile, smallest first; the batch's longest request decides which one a pass uses.
constexpr int32_t kRowTiles[] = {8, 16};
constexpr int32_t kMaxRows = 32;  // two tiles of 16: the second finds the keys in the L2 cache
constexpr int32_t kMaxHeadDim = 256;
// Wider heads leave no registers for 16 rows of accumulators.
constexpr int32_t kMaxDimsOf16Rows = 320;

// Sizes of clusters, so that few CTAs are left without work.
constexpr int32_t kClusterSizes[] = {2, 3, 4, 6, 8};
// CTAs of the plan: each finds the whole line, and they share the writing.
constexpr uint32_t kPlanCtas = 4;
static_assert(kPlanCtas + 1 + kPrefixLevels <= kMaxPlanBlocks);  // with prefill's and groups'
// Keys of a box of the bulk copy engine, whose rows are 64 elements of 16 bits.
constexpr int32_t kBoxKeys = 16;
constexpr uint32_t kBoxColumns = 64;

struct Variant {
  int32_t row_tile;
  int32_t max_heads;  // heads of an item
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
    found.push_back(
        {row_tile, std::gcd(decode_warps(head_dim, head_dim_v, row_tile), spec.kv_heads),
         decode_plan_variant(row_tile, setup.sm), make_variant(family(kFolder), values, setup.sm)});
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

// Returns the (token, key) pairs that prefill computes while decode reads a unit of keys: decode at
// 4.2 TB/s, prefill at 650 TFLOP/s (H200, 2026-11-21).
float pairs_per_unit(const AttentionSetup& setup) {
  constexpr float kFlopsPerByte = 650.0f / 4.2f;
  const DType stored = cached(setup.spec) ? setup.cache.dtype : setup.spec.q_dtype;
  return static_cast<float>(hopper::kDecodeUnit) * static_cast<float>(dtype_bytes(stored)) *
         kFlopsPerByte / static_cast<float>(2 * setup.spec.q_heads);
}

DecodeWork carve(std::byte* workspace, const AttentionSetup& setup, const BatchLimits& limits,
                 const Variant& variant, size_t& bytes) {
  WorkspaceCarver carver(workspace);
  const AttentionSpec& spec = setup.spec;
  const int64_t ctas = setup.multiprocessors;
  const int64_t partial_rows = 2 * ctas * variant.max_heads * variant.row_tile;
  DecodeWork list{};
  list.items =
      carver.take<DecodeItem>(max_tiles(spec, limits, variant.row_tile) * spec.kv_heads + ctas);
  list.ranges = carver.take<DecodeRange>(ctas);
  list.partial_out = carver.take<float>(partial_rows * spec.head_dim_v);
  list.partial_lse = carver.take<float>(partial_rows);
  list.tickets = carver.take<int32_t>(2 * ctas);
  list.ctas = static_cast<int32_t>(ctas);
  list.cluster = 1;
  list.max_heads = variant.max_heads;
  list.min_units = hopper::kMinDecodeUnits;
  bytes = std::max(bytes, carver.bytes());
  return list;
}

size_t workspace_bytes(const AttentionSetup& setup, const BatchLimits& limits) {
  // Only one plan is valid at a time, so the lists share their bytes.
  size_t bytes = 0;
  for (const Variant& variant : find_variants(setup)) {
    carve(nullptr, setup, limits, variant, bytes);
  }
  return bytes;
}

// Describes the keys or the values of a layer's cache, [page, place, kv head, dim], in units of 16
// bits.
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
      : setup_(setup), pairs_per_unit_(pairs_per_unit(setup)) {
    for (Variant& variant : find_variants(setup)) {
      Kernel plan(variant.plan, store), attention(variant.attention, store);
      check_argument(attention.row_tile() == variant.row_tile,
                     "{} has row tiles of {}, its plan {}", variant.attention.name,
                     attention.row_tile(), variant.row_tile);
      loaded_.push_back({std::move(variant), std::move(plan), std::move(attention), {}, {}});
      for (const int32_t size : kClusterSizes) {
        loaded_.back().clusters.push_back(
            {size, loaded_.back().attention.active_clusters(static_cast<uint32_t>(size))});
      }
    }
    check_argument(!loaded_.empty(), "{} has no variant for these layers", kFolder);
    for (const Loaded& loaded : loaded_) {
      kernels_.push_back({loaded.variant.row_tile, loaded.clusters});
    }
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
    limits_ = limits;
  }

  // Host figures choose the row tile, so that a captured pass keeps its kernels.
  void plan(const PlanRequest& request, PlanQueue& plans) override {
    const hopper::DecodeChoice choice = hopper::choose_decode(
        setup_.spec, setup_.multiprocessors, kernels_, hopper::bounds_of(request, limits_));
    active_ = &loaded_[choice.kernel];
    list_ = active_->list;
    list_.ctas = choice.ctas;
    list_.cluster = choice.cluster;
    list_.cluster_part_units = choice.cluster_part_units;
    list_written_ = false;
    prefix_written_ = request.keys.prefix_written;
    plans.add(active_->plan, kPlanCtas,
              DecodePlanParams{request.batch, list_, setup_.multiprocessors / 2, pairs_per_unit_});
  }

  // In a mixed batch prefill starts as soon as every block of this kernel has waited for the
  // preceding work.
  void attend(const AttentionParams& given, int32_t layer, gpu::Launcher launcher) override {
    DecodeParams params{
        given, list_, list_written_, list_written_ && prefix_written_, !maps_.empty(), {}, {}};
    list_written_ = true;
    if (params.boxes) {
      params.k_map = maps_[static_cast<size_t>(layer)].k;
      params.v_map = maps_[static_cast<size_t>(layer)].v;
    }
    active_->attention.launch(
        {static_cast<uint32_t>(list_.ctas)}, params, launcher,
        {.overlapped = true, .cluster = static_cast<uint32_t>(list_.cluster)});
  }

 private:
  struct Loaded {
    Variant variant;
    Kernel plan, attention;
    DecodeWork list;
    std::vector<hopper::ClusterCapacity> clusters;  // by size
  };
  struct LayerMaps {
    TensorMap k, v;
  };

  AttentionSetup setup_;
  float pairs_per_unit_;
  BatchLimits limits_;
  std::vector<LayerMaps> maps_;  // empty: keys are copied row by row
  std::vector<Loaded> loaded_;
  std::vector<hopper::DecodeKernel> kernels_;  // as loaded_
  // The planned batch:
  const Loaded* active_ = nullptr;
  DecodeWork list_{};
  bool list_written_ = false;  // by a kernel that an attention of this pass has waited for
  bool prefix_written_ = false;
};

std::unique_ptr<AttentionKernel> load(const AttentionSetup& setup, gpu::KernelStore& store) {
  return std::make_unique<HopperDecode>(setup, store);
}

// Clusters that run at the same time on a device that nobody has asked: those of an H200, or as
// many as have multiprocessors.
std::vector<hopper::ClusterCapacity> usual_clusters(int32_t multiprocessors) {
  if (multiprocessors == 132) return {{2, 66}, {3, 39}, {4, 30}, {6, 20}, {8, 15}};
  std::vector<hopper::ClusterCapacity> clusters;
  for (const int32_t size : kClusterSizes) clusters.push_back({size, multiprocessors / size});
  return clusters;
}

}  // namespace

std::string describe_hopper_decode(const AttentionSetup& setup, const BatchLimits& limits) {
  const std::vector<hopper::ClusterCapacity> clusters = usual_clusters(setup.multiprocessors);
  std::vector<hopper::DecodeKernel> kernels;
  for (const Variant& variant : find_variants(setup)) {
    kernels.push_back({variant.row_tile, clusters});
  }
  if (kernels.empty()) return {};
  std::string text;
  for (const int32_t requests : std::set{1, limits.max_requests}) {
    const hopper::DecodeChoice choice =
        hopper::choose_decode(setup.spec, setup.multiprocessors, kernels,
                              {.requests = requests,
                               .all_requests = requests,
                               .tokens = requests,
                               .kv_len = limits.max_kv_len,
                               .q_heads = setup.spec.q_heads,
                               .kv_heads = setup.spec.kv_heads,
                               .prefix_written = true});
    text += fmt::format(
        "{} decode{} of {} keys: row tiles of {}, {}; ", requests, requests == 1 ? "" : "s",
        limits.max_kv_len, kernels[choice.kernel].row_tile,
        choice.cluster == 1 ? "no clusters" : fmt::format("clusters of {}", choice.cluster));
  }
  return text + fmt::format("prefill from {} packed rows of a request on",
                            hopper_max_decode_rows(setup) + 1);
}

const AttentionFamily& hopper_decode() {
  static constexpr AttentionFamily kFamily = {.folder = kFolder,
                                              .row_tile = kMaxRows,
                                              .variants = variants,
                                              .workspace_bytes = workspace_bytes,
                                              .load = load};
  return kFamily;
}

}  // namespace fovea::kernels::cuda
