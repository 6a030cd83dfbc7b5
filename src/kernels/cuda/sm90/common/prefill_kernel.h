// SPDX-License-Identifier: Apache-2.0
// A loaded variant of a Hopper prefill kernel and the tensor maps that it takes.
#pragma once

#include <numeric>
#include <vector>

#include "core/check.h"
#include "gpu/tensor_map.h"
#include "kernels/cuda/attention_kernel.h"
#include "kernels/cuda/common/prefill_params.h"
#include "kernels/cuda/sm90/common/prefill_setup.h"

namespace fovea::kernels::cuda::prefill {

inline constexpr uint64_t kWordBytes = 2;  // maps count in 16-bit words: two fp8 elements each
inline constexpr uint32_t kBoxColumns = kColumnBlock;

inline uint64_t bytes_of(int64_t elements, DType dtype) {
  return static_cast<uint64_t>(elements) * dtype_bytes(dtype);
}

struct KeySizes {
  int64_t dim, heads, places, pages;  // packed rows are one page
};
struct KeyStrides {
  int64_t head, place, page;  // elements
};

inline gpu::TensorMapSpec key_map(const void* data, DType dtype, const KeySizes& sizes,
                                  const KeyStrides& strides, int32_t box_keys) {
  gpu::TensorMapSpec spec;
  spec.data = data;
  spec.sizes = {bytes_of(sizes.dim, dtype) / kWordBytes, static_cast<uint64_t>(sizes.heads),
                static_cast<uint64_t>(sizes.places), static_cast<uint64_t>(sizes.pages)};
  spec.strides = {bytes_of(strides.head, dtype), bytes_of(strides.place, dtype),
                  bytes_of(strides.page, dtype)};
  spec.box = {kBoxColumns, 1, static_cast<uint32_t>(box_keys), 1};
  return spec;
}

inline TensorMap encoded(const gpu::TensorMapSpec& spec) {
  TensorMap map;
  gpu::encode_tensor_map(spec, &map);
  return map;
}

// Returns the map of [tokens, q_heads, dim] whose box is the 64 rows of a consumer: 2^shift heads
// of some tokens.
inline gpu::TensorMapSpec row_map(int32_t q_heads, int32_t shift, int32_t tokens, const void* data,
                                  DType dtype, int64_t dim, int64_t head_stride,
                                  int64_t token_stride) {
  gpu::TensorMapSpec spec;
  spec.rank = 3;
  spec.data = data;
  spec.sizes = {bytes_of(dim, dtype) / kWordBytes, static_cast<uint64_t>(q_heads),
                static_cast<uint64_t>(tokens)};
  spec.strides = {bytes_of(head_stride, dtype), bytes_of(token_stride, dtype)};
  spec.box = {kBoxColumns, 1u << shift, static_cast<uint32_t>(kGroupRows >> shift)};
  return spec;
}

// Maps of packed keys, whose address changes with every pass.
class PackedKeys {
 public:
  // Encodes the maps of params.attention.keys. `tokens` is their number of rows where strides do
  // not say it.
  void encode(const AttentionSetup& setup, const SharedKeys& shared, int32_t tokens,
              PrefillParams& params) {
    const AttentionSpec& spec = setup.spec;
    const KeyParams& keys = params.attention.keys;
    const int32_t heads = params.attention.batch.kv_heads;
    const int64_t rows = keys.k_page_stride > 0 ? keys.k_page_stride / keys.k_token_stride : tokens;
    const int32_t dims = setup.shared_key_dims;
    k_.encode(key_map(keys.k, spec.q_dtype, {spec.head_dim - dims, heads, rows, 1},
                      {keys.k_head_stride, keys.k_token_stride, rows * keys.k_token_stride},
                      params.box_keys),
              &params.k);
    v_.encode(key_map(keys.v, spec.q_dtype, {spec.head_dim_v, heads, rows, 1},
                      {keys.v_head_stride, keys.v_token_stride, rows * keys.v_token_stride},
                      params.box_keys),
              &params.v);
    params.shared_blocks = dims / kColumnBlock;
    if (dims == 0) return;
    const int64_t stride = shared.row_stride;
    shared_.encode(key_map(shared.rows, spec.q_dtype, {dims, 1, rows, 1},
                           {stride, stride, rows * stride}, params.box_keys),
                   &params.shared_k);
  }

 private:
  gpu::RepeatedTensorMap k_, v_, shared_;
};

// A loaded variant with the maps of every layer: the size of boxes depends on its key tile.
class PrefillKernel {
 public:
  PrefillKernel(const AttentionSetup& setup, const gpu::KernelVariant& variant,
                int32_t min_row_tile, gpu::KernelStore& store)
      : kernel_(variant, store) {
    check_argument(kernel_.row_tile() >= min_row_tile, "{} has row tiles of {}, the workspace {}",
                   variant.name, kernel_.row_tile(), min_row_tile);
    const AttentionSpec& spec = setup.spec;
    box_keys_ = kernel_.key_tile();
    if (!cached(spec) || gathers(setup)) return;
    box_keys_ = std::gcd(box_keys_, setup.cache.page_size);
    for (const KvLayerView& view : setup.layers) {
      const int64_t pages = view.slots / view.page_size;
      layers_.push_back(
          {encoded(
               key_map(view.k, view.dtype, {spec.head_dim, spec.kv_heads, view.page_size, pages},
                       {view.k_head_stride, view.k_token_stride, view.k_page_stride}, box_keys_)),
           encoded(
               key_map(view.v, view.dtype, {spec.head_dim_v, spec.kv_heads, view.page_size, pages},
                       {view.v_head_stride, view.v_token_stride, view.v_page_stride}, box_keys_))});
    }
  }

  const Kernel& kernel() const { return kernel_; }
  int32_t box_keys() const { return box_keys_; }
  // Returns the keys of a segment, for variants that sum segments.
  int32_t segment_keys() const { return kSegmentKeys / kernel_.key_tile() * kernel_.key_tile(); }
  const TensorMap& k(int32_t layer) const { return layers_[static_cast<size_t>(layer)].k; }
  const TensorMap& v(int32_t layer) const { return layers_[static_cast<size_t>(layer)].v; }

 private:
  struct LayerMaps {
    TensorMap k, v;
  };

  Kernel kernel_;
  int32_t box_keys_ = 0;
  std::vector<LayerMaps> layers_;
};

// How the planned pass is launched.
struct Launch {
  const PrefillKernel* kernel = nullptr;
  int32_t cluster = 1;  // blocks of a cluster
  int32_t blocks = 0;
};

}  // namespace fovea::kernels::cuda::prefill
