// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/narrow_gemm/launch.h"

#include <algorithm>

#include "core/check.h"
#include "core/rounding.h"
#include "gpu/architectures.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kGroupColumns = 64;  // rows of the weight of a warpgroup
constexpr uint32_t kBoxDepth = 64;     // values of k in a box
constexpr uint32_t kGroup = 8;         // rows of the weight that stay together

uint64_t bytes(int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); }

int32_t weight_rows(const SkinnyGemmParams& params) {
  return params.up_offset > 0 ? 2 * params.n : params.n;
}
int32_t tiles_of(const SkinnyGemmParams& params, int32_t groups) {
  return ceil_div(weight_rows(params), groups * kGroupColumns);
}

// Returns how many adjacent rows of the weight are in a box, which n is a multiple of.
uint32_t rows_together(const SkinnyGemmParams& params) {
  return params.up_offset > 0 ? kGroup : 2 * kGroup;
}

// Describes the weight as in NarrowGemmParams.
gpu::TensorMapSpec weight_of(const SkinnyGemmParams& params, int32_t groups) {
  const bool gated = params.up_offset > 0;
  const uint64_t row = bytes(params.weight_stride);
  return {
      .data = params.weight,
      .rank = 4,
      .sizes = {static_cast<uint64_t>(params.k), kGroup, 2,
                static_cast<uint64_t>(params.n) / rows_together(params)},
      .strides = {row, gated ? row * static_cast<uint64_t>(params.up_offset) : row * kGroup,
                  row * rows_together(params)},
      .box = {kBoxDepth, kGroup, 2, static_cast<uint32_t>(groups * kGroupColumns) / (2 * kGroup)}};
}

gpu::TensorMapSpec rows_of(const SkinnyGemmParams& params, int32_t row_tile) {
  return {.data = params.x,
          .rank = 2,
          .sizes = {static_cast<uint64_t>(params.k), static_cast<uint64_t>(params.rows)},
          .strides = {bytes(params.x_stride)},
          .box = {kBoxDepth, static_cast<uint32_t>(row_tile)}};
}

}  // namespace

NarrowProducts::NarrowProducts(int sm, gpu::KernelStore& store) {
  if (sm != gpu::kHopper) return;
  const Family& gemm = family("sm90/narrow_gemm");
  for (const int32_t rows : kRowTiles) {
    for (int32_t groups = 1; groups <= kMaxGroups; ++groups) {
      kernels_.emplace_back(make_variant(gemm, {std::to_string(rows), std::to_string(groups)}, sm),
                            store);
    }
  }
}

// Tiles of the weight are whole groups of rows. Threads store four outputs at once.
bool NarrowProducts::computes(const SkinnyGemmParams& params) const {
  const auto is_aligned = [](const void* address, uintptr_t alignment) {
    return reinterpret_cast<uintptr_t>(address) % alignment == 0;
  };
  constexpr int32_t kElements = 8;  // copies need rows aligned to 16 bytes
  const uintptr_t four_outputs = params.out_is_f32 != 0 ? 16 : 8;
  const uintptr_t four_biases = params.out_is_f32 != 0 || params.stream != nullptr ? 16 : 8;
  return !kernels_.empty() && params.rows >= kMinRows && params.rows <= kMaxRows && params.n >= 1 &&
         params.n % static_cast<int32_t>(rows_together(params)) == 0 && params.k >= kNarrowDepth &&
         params.k % kNarrowDepth == 0 && is_aligned(params.x, 16) &&
         is_aligned(params.weight, 16) && params.x_stride % kElements == 0 &&
         params.weight_stride % kElements == 0 && is_aligned(params.out, four_outputs) &&
         params.out_stride % 4 == 0 && params.up_offset % 4 == 0 &&
         is_aligned(params.bias, four_biases) && is_aligned(params.stream, 16) &&
         is_aligned(params.norm.weight, 16) && is_aligned(params.in_squares, 16);
}

bool NarrowProducts::serves(const SkinnyGemmParams& params) const {
  return computes(params) && (params.rows <= kMaxRowsOfSmallWeights ||
                              int64_t{weight_rows(params)} * params.k >= kMinLargeWeight);
}

size_t NarrowProducts::row_tile_of(int32_t rows) {
  const auto* const found = std::ranges::lower_bound(kRowTiles, rows);
  check_argument(found != kRowTiles.end(), "{} rows, must be at most {}", rows, kMaxRows);
  return static_cast<size_t>(found - kRowTiles.begin());
}

// Takes the division in which a multiprocessor moves the fewest bytes into and out of its shared
// memory. A multiprocessor has one block at a time. Where all of them have one, the next product
// cannot begin early.
NarrowProducts::Division NarrowProducts::division_of(const SkinnyGemmParams& params) {
  constexpr int64_t kMultiprocessors = 132;
  constexpr int64_t kMaxWithRoom = 110;  // with more blocks, the next product waits for them
  constexpr int64_t kLateStart = 1000;   // as long as moving so many rows of a step
  const int64_t rows = kRowTiles[row_tile_of(params.rows)];
  const auto cost = [&](const Division& division) {
    const int64_t groups = division.groups;
    const int64_t blocks = int64_t{tiles_of(params, division.groups)} * division.splits;
    const int64_t steps = ceil_div(int64_t{params.k} / kNarrowDepth, int64_t{division.splits});
    const int64_t copied = groups * kGroupColumns + rows;
    const int64_t multiplied = groups * (kGroupColumns + rows);
    return ceil_div(blocks, kMultiprocessors) * steps * (copied + multiplied) +
           (blocks > kMaxWithRoom ? kLateStart : 0);
  };
  return *std::ranges::min_element(kDivisions, {}, cost);
}

void NarrowProducts::run(const SkinnyGemmParams& params, Stream stream) const {
  run(params, division_of(params), stream);
}

void NarrowProducts::run(const SkinnyGemmParams& given, Division division, Stream stream) const {
  const size_t row_tile = row_tile_of(given.rows);
  const Kernel& kernel = kernels_[row_tile * kMaxGroups + static_cast<size_t>(division.groups - 1)];
  NarrowGemmParams params{};
  gpu::encode_tensor_map(weight_of(given, division.groups), &params.weight);
  gpu::encode_tensor_map(rows_of(given, kRowTiles[row_tile]), &params.x);
  params.product = given;
  params.splits = division.splits;
  const int32_t blocks = tiles_of(given, division.groups) * division.splits;
  kernel.launch({static_cast<uint32_t>(blocks)}, params, stream,
                {.overlapped = true, .cluster = static_cast<uint32_t>(division.splits)});
}

}  // namespace fovea::kernels::cuda
