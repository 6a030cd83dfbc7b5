// SPDX-License-Identifier: Apache-2.0
#include "fovea/convert_pages.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "gpu/gpu.h"
#include "kernels/cuda/store.h"
#include "kvcache/page_moves.h"

namespace fovea {
namespace {

namespace cuda = kernels::cuda;

bool has_fixed_scales(const KvCacheSpec& spec) {
  return spec.scale == KvScale::per_tensor || spec.scale == KvScale::per_head;
}

// Returns true if rows have the same bytes in both pools.
bool same_rows(const KvCacheSpec& a, const KvCacheSpec& b) {
  return a.layout == b.layout && a.dtype == b.dtype && a.scale == b.scale;
}

void check_pools(const KvPool& from, const KvPool& to) {
  const KvCacheSpec &a = from.spec(), &b = to.spec();
  check_argument(from.device() == to.device(), "from is on {}, to is on {}",
                 device_name(from.device()), device_name(to.device()));
  const auto same = [](int64_t one, int64_t other, std::string_view name) {
    check_argument(one == other, "{} is {} in `from` and {} in `to`", name, one, other);
  };
  check_argument((a.layout == KvLayout::mha) == (b.layout == KvLayout::mha),
                 "layout: one pool has keys and values, the other latents");
  same(a.layers, b.layers, "layers");
  same(a.kv_heads, b.kv_heads, "kv_heads");
  same(a.head_dim, b.head_dim, "head_dim");
  same(a.head_dim_v, b.head_dim_v, "head_dim_v");
  if (has_fixed_scales(a) || has_fixed_scales(b)) {
    fail(ErrorCode::unsupported, "scale: the caller sets scales once for all pages");
  }
  if (a.window > 0 || b.window > 0) {
    fail(ErrorCode::unsupported,
         "window: a pool that keeps a window has no pages of whole requests");
  }
  const bool has_joined_rows =
      a.layout == KvLayout::mla_fp8_rows || b.layout == KvLayout::mla_fp8_rows;
  if (from.device().kind != DeviceKind::cpu && has_joined_rows && !same_rows(a, b)) {
    fail(ErrorCode::unsupported, "layout: a GPU does not convert rows of 656 bytes");
  }
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
  Converter(const KvPool& from, const KvPool& to)
      : from_(from),
        to_(to),
        moves_(same_rows(from.spec(), to.spec()) ? make_row_copies(from, to)
                                                 : make_row_conversions(from, to)) {
    if (from.device().kind == DeviceKind::cpu) return;
    context_.emplace(from.device().index).bind();
    kernels_ = cuda::PageCopy(context_->info().sm, cuda::kernel_store());
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
      move_on_gpu(from_pages, to_pages, tokens, stream);
    } else {
      moves_->run({from_pages, to_pages, tokens});
    }
  }

 private:
  void move_on_gpu(std::span<const int64_t> from_pages, std::span<const int64_t> to_pages,
                   int64_t tokens, Stream stream) const {
    context_->bind();
    cuda::MovedTokens moved{};
    moved.heads = from_.spec().kv_heads;
    moved.from_page_size = from_.spec().page_size;
    moved.to_page_size = to_.spec().page_size;
    // A launch may begin inside a page.
    const int64_t step =
        int64_t{cuda::kMaxCopiedPages - 1} * std::min(moved.from_page_size, moved.to_page_size);
    for (int64_t first = 0; first < tokens; first += step) {
      moved.first = first;
      moved.tokens = static_cast<int32_t>(std::min(step, tokens - first));
      const auto list = [&](std::span<const int64_t> pages, int32_t size, int32_t* to) {
        const int64_t last = (first + moved.tokens - 1) / size;
        for (int64_t page = first / size; page <= last; ++page) {
          *to++ = static_cast<int32_t>(pages[static_cast<size_t>(page)]);
        }
      };
      list(from_pages, moved.from_page_size, moved.from_pages);
      list(to_pages, moved.to_page_size, moved.to_pages);
      moves_->enqueue(moved, kernels_, stream);
    }
  }

  const KvPool &from_, &to_;
  const std::unique_ptr<PageMoves> moves_;
  std::optional<gpu::Context> context_;
  cuda::PageCopy kernels_;
};

}  // namespace

std::unique_ptr<PageConverter> make_page_converter(const KvPool& from, const KvPool& to) {
  check_pools(from, to);
  return std::make_unique<Converter>(from, to);
}

}  // namespace fovea
