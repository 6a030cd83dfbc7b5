// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "core/rounding.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/mla_project.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kSideColumns = 128;  // columns of keys, of values
constexpr uint32_t kBoxColumns = 64;   // columns of every box
constexpr uint32_t kStoredRows = 64;   // rows of a warpgroup
constexpr int64_t kPair = 2;           // blocks of a cluster

// Time of a tile of keys or values relative to that of a pair's tile of both (chosen on H200,
// 2026-11-28).
constexpr float kSideTime = 0.65f;

uint64_t bytes(int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); }

}  // namespace

bool MlaProject::serves(const MlaProjectSetup& setup) {
  return setup.sm == 90 && setup.nope_dim <= kSideColumns && setup.v_dim <= kSideColumns &&
         setup.rank % static_cast<int32_t>(kBoxColumns) == 0;
}

std::vector<gpu::KernelVariant> MlaProject::variants(const MlaProjectSetup& setup) {
  const auto variant = [&](const char* tile) {
    return make_variant(family("sm90/mla_project"),
                        {*variant_type(setup.dtype), setup.gathers ? "true" : "false", tile},
                        setup.sm);
  };
  return {variant("pairs"), variant("sides")};
}

MlaProject::MlaProject(const MlaProjectSetup& setup, gpu::KernelStore& store)
    : setup_(setup), pairs_(variants(setup)[0], store), sides_(variants(setup)[1], store) {}

void MlaProject::run(const MlaProjectTensors& tensors, gpu::Launcher launcher) const {
  const auto row_tile = static_cast<uint32_t>(pairs_.row_tile());
  const auto rank = static_cast<uint64_t>(setup_.rank),
             heads = static_cast<uint64_t>(tensors.heads),
             rows = static_cast<uint64_t>(tensors.rows);
  MlaProjectParams params{};
  if (setup_.gathers) {
    params.cache = tensors.latents;
    params.offsets = tensors.offsets;
    params.rotary = tensors.rotary;
    params.rope_dim = tensors.rope_dim;
  } else {
    maps_.latents.encode({.data = tensors.latents,
                          .rank = 2,
                          .sizes = {rank, rows},
                          .strides = {bytes(tensors.latents_row_stride)},
                          .box = {kBoxColumns, row_tile}},
                         &params.latents);
  }
  // Four dimensions, as load_box_to_pair() takes.
  const auto encode_weights = [&](const void* data, int32_t width, int64_t head_stride,
                                  gpu::RepeatedTensorMap& repeated, TensorMap& map) {
    repeated.encode({.data = data,
                     .rank = 4,
                     .sizes = {rank, static_cast<uint64_t>(width), heads, 1},
                     .strides = {bytes(setup_.rank), bytes(head_stride), bytes(head_stride)},
                     .box = {kBoxColumns, kSideColumns, 1, 1}},
                    &map);
  };
  encode_weights(tensors.w_uk, setup_.nope_dim, tensors.w_uk_head_stride, maps_.w_uk, params.w_uk);
  encode_weights(tensors.w_uv, setup_.v_dim, tensors.w_uv_head_stride, maps_.w_uv, params.w_uv);
  const auto encode_out = [&](const void* data, int32_t width, int64_t head_stride,
                              int64_t token_stride, gpu::RepeatedTensorMap& repeated,
                              TensorMap& map) {
    repeated.encode({.data = data,
                     .rank = 3,
                     .sizes = {static_cast<uint64_t>(width), heads, rows},
                     .strides = {bytes(head_stride), bytes(token_stride)},
                     .box = {kBoxColumns, 1, kStoredRows}},
                    &map);
  };
  encode_out(tensors.keys, setup_.nope_dim, tensors.keys_head_stride, tensors.keys_token_stride,
             maps_.keys, params.keys);
  encode_out(tensors.values, setup_.v_dim, tensors.values_head_stride, tensors.values_token_stride,
             maps_.values, params.values);
  params.live_rows = tensors.live_rows;
  params.rows = tensors.rows;
  params.heads = tensors.heads;
  params.rank = setup_.rank;
  const int64_t row_tiles = ceil_div(int64_t{tensors.rows}, int64_t{row_tile});
  const int64_t paired = ceil_div(row_tiles, kPair) * tensors.heads,
                sides = 2 * row_tiles * tensors.heads;
  const int64_t blocks = setup_.multiprocessors, pairs = blocks / kPair;
  if (kSideTime * static_cast<float>(ceil_div(sides, blocks)) <
      static_cast<float>(ceil_div(paired, pairs))) {
    sides_.launch({static_cast<uint32_t>(std::min(sides, blocks))}, params, launcher, kOverlapped);
  } else {
    pairs_.launch({static_cast<uint32_t>(kPair * std::min(paired, pairs))}, params, launcher,
                  {.overlapped = true, .cluster = static_cast<uint32_t>(kPair)});
  }
}

}  // namespace fovea::kernels::cuda
