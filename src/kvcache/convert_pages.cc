// SPDX-License-Identifier: Apache-2.0
#include "fovea/convert_pages.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "gpu/gpu.h"
#include "kernels/cuda/portable/page_copy/launch.h"
#include "kernels/cuda/store.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;
using cuda::CopiedRows;

constexpr int64_t kFp8RowBytes = 656;  // KvLayout::mla_fp8_rows
constexpr int64_t kScaleBytes = sizeof(float);

void check_pools(const KvPool& from, const KvPool& to) {
  const KvCacheSpec &a = from.spec(), &b = to.spec();
  check_argument(from.device() == to.device(), "from is on {}, to is on {}",
                 device_name(from.device()), device_name(to.device()));
  const auto same = [](int64_t one, int64_t other, std::string_view name) {
    check_argument(one == other, "{} is {} in `from` and {} in `to`", name, one, other);
  };
  check_argument(a.dtype == b.dtype, "dtype is {} in `from` and {} in `to`", dtype_name(a.dtype),
                 dtype_name(b.dtype));
  same(static_cast<int64_t>(a.layout), static_cast<int64_t>(b.layout), "layout");
  same(static_cast<int64_t>(a.scale), static_cast<int64_t>(b.scale), "scale");
  same(a.layers, b.layers, "layers");
  same(a.kv_heads, b.kv_heads, "kv_heads");
  same(a.head_dim, b.head_dim, "head_dim");
  same(a.head_dim_v, b.head_dim_v, "head_dim_v");
  if (a.scale == KvScale::per_tensor || a.scale == KvScale::per_head) {
    fail(ErrorCode::unsupported, "scale: the caller sets scales once for all pages");
  }
  if (a.window > 0 || b.window > 0) {
    fail(ErrorCode::unsupported,
         "window: a pool that keeps a window has no pages of whole requests");
  }
}

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
  std::vector<CopiedRows> arrays = {
      copied(key_rows(a), key_rows(b),
             spec.layout == KvLayout::mla_fp8_rows ? kFp8RowBytes : spec.head_dim * element)};
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

// Throws if a request of this length cannot have these pages.
void check_pages(std::span<const int64_t> pages, const KvPool& pool, int64_t tokens,
                 std::string_view name) {
  const int64_t size = pool.spec().page_size;
  check_argument(static_cast<int64_t>(pages.size()) * size >= tokens,
                 "{} holds {} pages of {}, too few for {} tokens", name, pages.size(), size,
                 tokens);
  for (const int64_t page : pages) {
    check_argument(page >= 0 && page < pool.pages(), "{} holds page {}, the pool has {}", name,
                   page, pool.pages());
  }
}

class Converter final : public PageConverter {
 public:
  Converter(const KvPool& from, const KvPool& to) : from_(from), to_(to) {
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
    context_.emplace(from.device().index).bind();
    copy_ = cuda::PageCopy(context_->info().sm, cuda::kernel_store());
  }
  ~Converter() override {
    if (context_) context_->bind_to_free();
  }

  void convert(std::span<const int64_t> from_pages, std::span<const int64_t> to_pages,
               int64_t tokens, Stream stream) override {
    check_argument(tokens >= 0, "tokens is {}, must not be negative", tokens);
    check_pages(from_pages, from_, tokens, "from_pages");
    check_pages(to_pages, to_, tokens, "to_pages");
    if (context_) {
      convert_on_gpu(from_pages, to_pages, tokens, stream);
    } else {
      convert_on_cpu(from_pages, to_pages, tokens);
    }
  }

 private:
  int32_t from_size() const { return from_.spec().page_size; }
  int32_t to_size() const { return to_.spec().page_size; }

  void convert_on_cpu(std::span<const int64_t> from_pages, std::span<const int64_t> to_pages,
                      int64_t tokens) const {
    for (const std::vector<CopiedRows>& arrays : layers_) {
      for (const CopiedRows& rows : arrays) {
        for (int64_t token = 0; token < tokens; ++token) {
          const char* from = rows.from + token % from_size() * rows.from_token +
                             from_pages[static_cast<size_t>(token / from_size())] * rows.from_page;
          char* to = rows.to + token % to_size() * rows.to_token +
                     to_pages[static_cast<size_t>(token / to_size())] * rows.to_page;
          for (int32_t head = 0; head < from_.spec().kv_heads; ++head) {
            std::memcpy(to + head * rows.to_head, from + head * rows.from_head,
                        static_cast<size_t>(rows.row_bytes));
          }
        }
      }
    }
  }

  void convert_on_gpu(std::span<const int64_t> from_pages, std::span<const int64_t> to_pages,
                      int64_t tokens, Stream stream) const {
    context_->bind();
    // A launch may begin inside a page.
    const int64_t step = int64_t{cuda::kMaxCopiedPages - 1} * std::min(from_size(), to_size());
    cuda::PageCopyParams params{};
    params.heads = from_.spec().kv_heads;
    params.from_page_size = from_size();
    params.to_page_size = to_size();
    for (int64_t first = 0; first < tokens; first += step) {
      params.first = first;
      params.tokens = static_cast<int32_t>(std::min(step, tokens - first));
      const auto list = [&](std::span<const int64_t> pages, int32_t size, int32_t* to) {
        const int64_t last = (first + params.tokens - 1) / size;
        for (int64_t page = first / size; page <= last; ++page) {
          *to++ = static_cast<int32_t>(pages[static_cast<size_t>(page)]);
        }
      };
      list(from_pages, from_size(), params.from_pages);
      list(to_pages, to_size(), params.to_pages);
      for (const std::vector<CopiedRows>& arrays : layers_) {
        std::ranges::copy(arrays, params.arrays);
        copy_.run(params, static_cast<int>(arrays.size()), stream);
      }
    }
  }

  const KvPool &from_, &to_;
  std::vector<std::vector<CopiedRows>> layers_;
  std::optional<gpu::Context> context_;
  cuda::PageCopy copy_;
};

}  // namespace

std::unique_ptr<PageConverter> make_page_converter(const KvPool& from, const KvPool& to) {
  check_pools(from, to);
  return std::make_unique<Converter>(from, to);
}

}  // namespace fovea
