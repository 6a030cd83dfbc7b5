// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/mla_project.h"

namespace fovea::kernels::cuda {
namespace {

constexpr int32_t kColumns = 128;  // of keys, of values
constexpr uint32_t kDepth = 64;    // of a box

uint64_t bytes(int64_t elements) { return static_cast<uint64_t>(elements) * sizeof(uint16_t); }

}  // namespace

bool MlaProject::serves(const MlaProjectSetup& setup) {
  return setup.sm == 90 && setup.nope_dim <= kColumns && setup.v_dim <= kColumns &&
         setup.rank % static_cast<int32_t>(kDepth) == 0;
}

gpu::KernelVariant MlaProject::variant(const MlaProjectSetup& setup) {
  return make_variant(family("sm90/mla_project"), {*variant_type(setup.dtype)}, setup.sm);
}

MlaProject::MlaProject(const MlaProjectSetup& setup, gpu::KernelStore& store)
    : setup_(setup), kernel_(variant(setup), store) {}

void MlaProject::run(const MlaProjectTensors& tensors, Stream stream) const {
  const auto row_tile = static_cast<uint32_t>(kernel_.row_tile());
  const auto rank = static_cast<uint64_t>(setup_.rank);
  MlaProjectParams params{};
  maps_.latents.encode({.data = tensors.latents,
                        .rank = 2,
                        .sizes = {rank, static_cast<uint64_t>(tensors.rows)},
                        .strides = {bytes(setup_.rank)},
                        .box = {kDepth, row_tile}},
                       &params.latents);
  const auto encode = [&](const void* data, int32_t width, int64_t head_stride,
                          gpu::RepeatedTensorMap& repeated, TensorMap& map) {
    repeated.encode(
        {.data = data,
         .rank = 3,
         .sizes = {rank, static_cast<uint64_t>(width), static_cast<uint64_t>(setup_.heads)},
         .strides = {bytes(setup_.rank), bytes(head_stride)},
         .box = {kDepth, kColumns, 1}},
        &map);
  };
  encode(tensors.w_uk, setup_.nope_dim, tensors.w_uk_head_stride, maps_.w_uk, params.w_uk);
  encode(tensors.w_uv, setup_.v_dim, tensors.w_uv_head_stride, maps_.w_uv, params.w_uv);
  params.keys = tensors.keys;
  params.values = tensors.values;
  params.keys_token_stride = tensors.keys_token_stride;
  params.keys_head_stride = tensors.keys_head_stride;
  params.values_token_stride = tensors.values_token_stride;
  params.values_head_stride = tensors.values_head_stride;
  params.live_rows = tensors.live_rows;
  params.rows = tensors.rows;
  params.heads = setup_.heads;
  params.rank = setup_.rank;
  params.nope_dim = setup_.nope_dim;
  params.v_dim = setup_.v_dim;
  const int64_t tiles = (tensors.rows + row_tile - 1) / row_tile * int64_t{setup_.heads};
  kernel_.launch({static_cast<uint32_t>(std::min<int64_t>(tiles, setup_.multiprocessors))}, params,
                 stream);
}

}  // namespace fovea::kernels::cuda
