// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>
#include <vector>

#include "kernels/kv_write.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/rows.h"
#include "kvcache/page_moves.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;
namespace reference = kernels::reference;

size_t index(int64_t i) { return static_cast<size_t>(i); }

// The values of dtypes are those of the kernels' types.
int32_t kernel_type(DType dtype) {
  static_assert(static_cast<int>(DType::f32) == 0 && static_cast<int>(DType::f16) == 1 &&
                static_cast<int>(DType::bf16) == 2 && static_cast<int>(DType::f8e4m3) == 3 &&
                static_cast<int>(DType::f8e5m2) == 4);
  return static_cast<int32_t>(dtype);
}

class RowConversions final : public PageMoves {
 public:
  RowConversions(const KvPool& from, const KvPool& to) : from_(from), to_(to) {}

  // Reads rows as f32 and writes them as a backend writes new ones.
  void run(const MovedRequest& request) const override {
    constexpr int64_t kTokens = 256;  // at a time
    const KvCacheSpec& spec = from_.spec();
    const std::vector<int64_t> from_slots = slots_of(request.from_pages, from_, request.tokens);
    const std::vector<int64_t> to_slots = slots_of(request.to_pages, to_, request.tokens);
    std::vector<float> keys(index(kTokens * spec.kv_heads * spec.head_dim));
    std::vector<float> values(has_values() ? index(kTokens * spec.kv_heads * spec.head_dim_v) : 0);
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
      for (int64_t first = 0; first < request.tokens; first += kTokens) {
        const size_t count = index(std::min(kTokens, request.tokens - first));
        read(from_.layer(layer), std::span(from_slots).subspan(index(first), count), keys, values);
        reference::kv_write(
            write_params(layer, std::span(to_slots).subspan(index(first), count), keys, values));
      }
    }
  }

  void enqueue(const cuda::MovedTokens& moved, const cuda::PageCopy& kernels,
               Stream stream) const override {
    for (int32_t layer = 0; layer < from_.spec().layers; ++layer) {
      const KvLayerView a = from_.layer(layer), b = to_.layer(layer);
      const KvCacheSpec& spec = from_.spec();
      cuda::PageConvertParams params{};
      params.moved = moved;
      params.arrays[0] =
          converted({a.k, a.k_page_stride, a.k_token_stride, a.k_head_stride, scales(a, a.k_scale)},
                    {b.k, b.k_page_stride, b.k_token_stride, b.k_head_stride, scales(b, b.k_scale)},
                    spec.head_dim);
      if (has_values()) {
        params.arrays[1] = converted(
            {a.v, a.v_page_stride, a.v_token_stride, a.v_head_stride, scales(a, a.v_scale)},
            {b.v, b.v_page_stride, b.v_token_stride, b.v_head_stride, scales(b, b.v_scale)},
            spec.head_dim_v);
      }
      kernels.convert(params, has_values() ? 2 : 1, stream);
    }
  }

 private:
  // The rows of keys or values in one pool; strides in elements.
  struct Side {
    char* data;
    int64_t page, token, head;
    float* scales;
  };

  bool has_values() const { return from_.spec().layout == KvLayout::mha; }
  static float* scales(const KvLayerView& view, float* of_rows) {
    return view.scale == KvScale::per_token_head ? of_rows : nullptr;
  }

  static std::vector<int64_t> slots_of(std::span<const int64_t> pages, const KvPool& pool,
                                       int64_t tokens) {
    const int64_t size = pool.spec().page_size;
    std::vector<int64_t> slots(index(tokens));
    for (int64_t token = 0; token < tokens; ++token) {
      slots[index(token)] = pages[index(token / size)] * size + token % size;
    }
    return slots;
  }

  // Reads [tokens, heads, dim] of keys and values.
  void read(const KvLayerView& view, std::span<const int64_t> slots, std::vector<float>& keys,
            std::vector<float>& values) const {
    const KvCacheSpec& spec = from_.spec();
    std::vector<double> row(index(std::max(spec.head_dim, spec.head_dim_v)));
    auto key = keys.begin();
    auto value = values.begin();
    const auto take = [&](auto to, int32_t dim) {
      return std::transform(row.begin(), row.begin() + dim, to,
                            [](double each) { return static_cast<float>(each); });
    };
    for (const int64_t slot : slots) {
      for (int32_t head = 0; head < spec.kv_heads; ++head) {
        const reference::CacheRow at{slot, head, spec.kv_heads};
        reference::load_k_row(view, at, spec.head_dim, row.data());
        key = take(key, spec.head_dim);
        if (!has_values()) continue;
        reference::load_v_row(view, at, spec.head_dim_v, row.data());
        value = take(value, spec.head_dim_v);
      }
    }
  }

  // A row of MLA is the latent and, behind it, the rotary key.
  kernels::KvWriteParams write_params(int32_t layer, std::span<const int64_t> slots,
                                      std::vector<float>& keys, std::vector<float>& values) const {
    const KvCacheSpec& spec = to_.spec();
    const int64_t heads = spec.kv_heads;
    kernels::KvWriteParams params;
    params.cache = to_.layer(layer);
    params.slots = slots.data();
    params.tokens = static_cast<int32_t>(slots.size());
    params.kv_heads = spec.kv_heads;
    if (has_values()) {
      params.k = dense_rows(keys.data(), DType::f32, heads, spec.head_dim);
      params.v = dense_rows(values.data(), DType::f32, heads, spec.head_dim_v);
      params.head_dim = spec.head_dim;
      params.head_dim_v = spec.head_dim_v;
      return params;
    }
    params.head_dim = spec.head_dim_v;
    params.head_dim_v = spec.head_dim - spec.head_dim_v;
    params.k = {keys.data(), DType::f32, spec.head_dim, spec.head_dim};
    if (params.head_dim_v > 0) {
      params.v = {keys.data() + spec.head_dim_v, DType::f32, spec.head_dim, spec.head_dim};
    }
    return params;
  }

  cuda::ConvertedRows converted(const Side& from, const Side& to, int32_t values) const {
    const auto from_bytes = static_cast<int64_t>(dtype_bytes(from_.spec().dtype));
    const auto to_bytes = static_cast<int64_t>(dtype_bytes(to_.spec().dtype));
    cuda::ConvertedRows rows{};
    rows.at = {from.data,
               to.data,
               from.page * from_bytes,
               from.token * from_bytes,
               from.head * from_bytes,
               to.page * to_bytes,
               to.token * to_bytes,
               to.head * to_bytes,
               0,
               0};
    rows.from_scales = from.scales;
    rows.to_scales = to.scales;
    rows.from_type = kernel_type(from_.spec().dtype);
    rows.to_type = kernel_type(to_.spec().dtype);
    rows.values = values;
    return rows;
  }

  const KvPool &from_, &to_;
};

}  // namespace

std::unique_ptr<PageMoves> make_row_conversions(const KvPool& from, const KvPool& to) {
  return std::make_unique<RowConversions>(from, to);
}

}  // namespace fovea
