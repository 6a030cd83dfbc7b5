// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/attention_kernel.h"

#include <algorithm>
#include <limits>

#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

int32_t rounded_up(int32_t dim) { return (dim + 15) / 16 * 16; }

}  // namespace

// Every request with rows adds less than one tile to the batch's rows / row_tile.
int64_t max_tiles(const AttentionSpec& spec, const BatchLimits& limits, int32_t row_tile) {
  const int64_t group = spec.q_heads / spec.kv_heads;
  const int64_t filled = std::min(limits.max_requests, limits.max_tokens);
  return (limits.max_tokens * group + filled * (row_tile - 1)) / row_tile;
}

WorkList carve_work_list(WorkspaceCarver& workspace, const AttentionSetup& setup,
                         const BatchLimits& limits, RowTiles row_tiles, int32_t ctas) {
  const AttentionSpec& spec = setup.spec;
  const int64_t tiles = max_tiles(spec, limits, row_tiles.min);
  const int64_t partial_rows = 2 * int64_t{ctas} * row_tiles.max;
  WorkList work{};
  work.ctas = ctas;
  work.items = workspace.take<WorkItem>(tiles * spec.kv_heads + ctas);
  work.cta_begin = workspace.take<int32_t>(ctas);
  work.cta_end = workspace.take<int32_t>(ctas);
  work.merges = workspace.take<MergeItem>(ctas);
  work.tile_indptr = workspace.take<int32_t>(int64_t{limits.max_requests} + 1);
  work.partial_out = workspace.take<float>(partial_rows * spec.head_dim_v);
  work.partial_lse = workspace.take<float>(partial_rows);
  return work;
}

std::optional<std::string> variant_type(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f8e4m3:
      return "f8e4m3";
    case DType::f8e5m2:
      return "f8e5m2";
    default:
      return std::nullopt;
  }
}

std::vector<std::string> fitting_values(std::string_view folder, int32_t head_dim,
                                        int32_t head_dim_v, const std::vector<std::string>& rest) {
  const VariantValues* best = nullptr;
  int32_t best_size = std::numeric_limits<int32_t>::max();
  for (const VariantValues& values : family(folder).baked) {
    const int32_t dim = std::stoi(values[0]), dim_v = std::stoi(values[1]);
    const bool same = std::equal(values.begin() + 2, values.end(), rest.begin(), rest.end());
    if (!same || dim < head_dim || dim_v < head_dim_v || dim + dim_v >= best_size) continue;
    best = &values;
    best_size = dim + dim_v;
  }
  if (best != nullptr) return *best;
  std::vector<std::string> values = {std::to_string(rounded_up(head_dim)),
                                     std::to_string(rounded_up(head_dim_v))};
  values.insert(values.end(), rest.begin(), rest.end());
  return values;
}

}  // namespace fovea::kernels::cuda
