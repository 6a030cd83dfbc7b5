// SPDX-License-Identifier: Apache-2.0
// Two pools in host memory, the first with random bytes, and the comparison of a moved request.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fovea/kv_cache.h"

namespace fovea::test {

struct ConvertCase {
  const char* name;
  KvCacheSpec from;
  KvOrder to_order;
  int32_t to_page_size;
};

inline std::string name_of_case(const testing::TestParamInfo<ConvertCase>& info) {
  return info.param.name;
}

// Rows of multiples of 16 bytes, of 4, and of 656; pages that divide each other or do not.
inline std::vector<ConvertCase> convert_cases() {
  const KvCacheSpec mha{.dtype = DType::bf16,
                        .layers = 2,
                        .kv_heads = 3,
                        .head_dim = 24,
                        .head_dim_v = 16,
                        .page_size = 16};
  KvCacheSpec fp8 = mha;
  fp8.dtype = DType::f8e4m3;
  fp8.scale = KvScale::per_token_head;
  fp8.order = KvOrder::hnd;
  fp8.head_dim_v = 20;
  KvCacheSpec mla{.layout = KvLayout::mla,
                  .dtype = DType::bf16,
                  .layers = 1,
                  .kv_heads = 1,
                  .head_dim = 48,
                  .head_dim_v = 32,
                  .page_size = 64};
  KvCacheSpec rows = mla;
  rows.layout = KvLayout::mla_fp8_rows;
  rows.dtype = DType::f8e4m3;
  rows.head_dim = 576;
  rows.head_dim_v = 512;
  return {{"larger_pages", mha, KvOrder::nhd, 64},
          {"smaller_pages_of_heads", mha, KvOrder::hnd, 4},
          {"pages_that_do_not_divide", mha, KvOrder::hnd, 24},
          {"scales_of_tokens", fp8, KvOrder::nhd, 8},
          {"latents", mla, KvOrder::nhd, 16},
          {"fp8_rows", rows, KvOrder::nhd, 1}};
}

// All bytes of a pool of make_kv_pool(), as its views describe them.
class PoolBytes {
 public:
  // Calls body(address, bytes) for each row of a token, in one order for all page sizes.
  template <typename Body>
  static void for_rows(const KvPool& pool, int64_t slot, const Body& body) {
    const KvCacheSpec& spec = pool.spec();
    const size_t element = dtype_bytes(spec.dtype);
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
      const KvLayerView view = pool.layer(layer);
      for (int32_t head = 0; head < spec.kv_heads; ++head) {
        if (spec.layout == KvLayout::mla_fp8_rows) {
          body(view.k + slot / spec.page_size * view.k_page_stride +
                   slot % spec.page_size * view.k_token_stride,
               size_t{656});
          continue;
        }
        body(k_address(view, slot, head), static_cast<size_t>(spec.head_dim) * element);
        if (spec.layout == KvLayout::mha) {
          body(v_address(view, slot, head), static_cast<size_t>(spec.head_dim_v) * element);
        }
        if (spec.scale != KvScale::per_token_head) continue;
        for (float* const scales : {view.k_scale, view.v_scale}) {
          body(reinterpret_cast<char*>(scales + slot * spec.kv_heads + head), sizeof(float));
        }
      }
    }
  }
  static std::vector<char> of_token(const KvPool& pool, int64_t slot) {
    std::vector<char> bytes;
    for_rows(pool, slot,
             [&](char* row, size_t count) { bytes.insert(bytes.end(), row, row + count); });
    return bytes;
  }
};

class ConvertedPools {
 public:
  explicit ConvertedPools(const ConvertCase& c) {
    KvCacheSpec spec = c.from;
    from_ = make_kv_pool(spec, kTokens / spec.page_size + 3);
    spec.page_size = c.to_page_size;
    spec.order = c.to_order;
    to_ = make_kv_pool(spec, kTokens / spec.page_size + 3);
    from_pages_ = pages_of(*from_);
    to_pages_ = pages_of(*to_);
    std::mt19937 random(7);
    for (int64_t slot = 0; slot < from_->pages() * from_->spec().page_size; ++slot) {
      PoolBytes::for_rows(*from_, slot, [&](char* row, size_t count) {
        for (size_t i = 0; i < count; ++i) row[i] = static_cast<char>(random() % 255 + 1);
      });
    }
  }

  KvPool& from() const { return *from_; }
  KvPool& to() const { return *to_; }
  const std::vector<int64_t>& from_pages() const { return from_pages_; }
  const std::vector<int64_t>& to_pages() const { return to_pages_; }

  // The pool was zero before.
  void expect_moved(int64_t tokens) const {
    std::vector<bool> is_written(static_cast<size_t>(to_->pages() * to_->spec().page_size));
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t slot = slot_of(*to_, to_pages_, token);
      is_written[static_cast<size_t>(slot)] = true;
      ASSERT_EQ(PoolBytes::of_token(*to_, slot),
                PoolBytes::of_token(*from_, slot_of(*from_, from_pages_, token)))
          << "token " << token;
    }
    for (size_t slot = 0; slot < is_written.size(); ++slot) {
      if (is_written[slot]) continue;
      for (const char byte : PoolBytes::of_token(*to_, static_cast<int64_t>(slot))) {
        ASSERT_EQ(byte, 0) << "slot " << slot;
      }
    }
  }

 private:
  static constexpr int64_t kTokens = 64;

  // All pages but 0 and the last one, in another order.
  static std::vector<int64_t> pages_of(const KvPool& pool) {
    std::vector<int64_t> pages;
    for (int64_t page = pool.pages() - 2; page > 0; --page) pages.push_back(page);
    return pages;
  }
  static int64_t slot_of(const KvPool& pool, const std::vector<int64_t>& pages, int64_t token) {
    const int64_t size = pool.spec().page_size;
    return pages[static_cast<size_t>(token / size)] * size + token % size;
  }

  std::unique_ptr<KvPool> from_, to_;
  std::vector<int64_t> from_pages_, to_pages_;
};

}  // namespace fovea::test
