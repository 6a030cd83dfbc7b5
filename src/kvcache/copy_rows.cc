// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/check.h"
#include "kernels/mla_row.h"
#include "kvcache/page_moves.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;
using cuda::CopiedRows;

constexpr int64_t kScaleBytes = sizeof(float);

// The rows of K or V in one pool, in bytes.
struct Rows {
  char* data;
  int64_t page, token, head;
};

CopiedRows copied(const Rows& from, const Rows& to, int64_t row_bytes) {
  CopiedRows rows{from.data,  to.data,   from.page,
                  from.token, from.head, to.page,
                  to.token,   to.head,   static_cast<int32_t>(row_bytes),
                  1};
  for (const int32_t unit : {4, 16}) {
    const auto fits = [&](int64_t value) { return value % unit == 0; };
    const bool all = fits(reinterpret_cast<intptr_t>(from.data)) &&
                     fits(reinterpret_cast<intptr_t>(to.data)) && fits(from.page) &&
                     fits(from.token) && fits(from.head) && fits(to.page) && fits(to.token) &&
                     fits(to.head) && fits(row_bytes);
    if (all) rows.unit = unit;
  }
  return rows;
}

Rows key_rows(const KvLayerView& view) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(view.dtype));
  return {view.k, view.k_page_stride * bytes, view.k_token_stride * bytes,
          view.k_head_stride * bytes};
}
Rows value_rows(const KvLayerView& view) {
  const auto bytes = static_cast<int64_t>(dtype_bytes(view.dtype));
  return {view.v, view.v_page_stride * bytes, view.v_token_stride * bytes,
          view.v_head_stride * bytes};
}
Rows scale_rows(float* scales, const KvLayerView& view, int64_t heads) {
  return {reinterpret_cast<char*>(scales), view.page_size * heads * kScaleBytes,
          heads * kScaleBytes, kScaleBytes};
}

// The arrays of one layer in both pools.
std::vector<CopiedRows> arrays_of(const KvPool& from, const KvPool& to, int32_t layer) {
  const KvCacheSpec& spec = from.spec();
  const KvLayerView a = from.layer(layer), b = to.layer(layer);
  const auto element = static_cast<int64_t>(dtype_bytes(spec.dtype));
  const bool is_mha = spec.layout == KvLayout::mha;
  std::vector<CopiedRows> arrays = {copied(
      key_rows(a), key_rows(b),
      spec.layout == KvLayout::mla_fp8_rows ? kernels::kMlaRowBytes : spec.head_dim * element)};
  if (is_mha) arrays.push_back(copied(value_rows(a), value_rows(b), spec.head_dim_v * element));
  if (spec.scale != KvScale::per_token_head) return arrays;
  arrays.push_back(copied(scale_rows(a.k_scale, a, spec.kv_heads),
                          scale_rows(b.k_scale, b, spec.kv_heads), kScaleBytes));
  if (is_mha) {
    arrays.push_back(copied(scale_rows(a.v_scale, a, spec.kv_heads),
                            scale_rows(b.v_scale, b, spec.kv_heads), kScaleBytes));
  }
  return arrays;
}

class RowCopies final : public PageMoves {
 public:
  RowCopies(const KvPool& from, const KvPool& to) : from_(from), to_(to) {
    for (int32_t layer = 0; layer < from.spec().layers; ++layer) {
      layers_.push_back(arrays_of(from, to, layer));
    }
    if (from.device().kind == DeviceKind::cpu) return;
    for (const CopiedRows& rows : layers_.front()) {
      if (rows.unit == 1) {
        fail(ErrorCode::unsupported, "rows of {} bytes: a GPU copies multiples of 4",
             rows.row_bytes);
      }
    }
  }

  void run(const MovedRequest& request) const override {
    const int64_t from_size = from_.spec().page_size, to_size = to_.spec().page_size;
    for (const std::vector<CopiedRows>& arrays : layers_) {
      for (const CopiedRows& rows : arrays) {
        for (int64_t token = 0; token < request.tokens; ++token) {
          const char* from =
              rows.from + token % from_size * rows.from_token +
              request.from_pages[static_cast<size_t>(token / from_size)] * rows.from_page;
          char* to = rows.to + token % to_size * rows.to_token +
                     request.to_pages[static_cast<size_t>(token / to_size)] * rows.to_page;
          for (int32_t head = 0; head < from_.spec().kv_heads; ++head) {
            std::memcpy(to + head * rows.to_head, from + head * rows.from_head,
                        static_cast<size_t>(rows.row_bytes));
          }
        }
      }
    }
  }

  void enqueue(const cuda::MovedTokens& moved, const cuda::PageCopy& kernels,
               Stream stream) const override {
    cuda::PageCopyParams params{};
    params.moved = moved;
    for (const std::vector<CopiedRows>& arrays : layers_) {
      std::ranges::copy(arrays, params.arrays);
      kernels.copy(params, static_cast<int>(arrays.size()), stream);
    }
  }

 private:
  const KvPool &from_, &to_;
  std::vector<std::vector<CopiedRows>> layers_;
};

}  // namespace

std::unique_ptr<PageMoves> make_row_copies(const KvPool& from, const KvPool& to) {
  return std::make_unique<RowCopies>(from, to);
}

}  // namespace fovea
