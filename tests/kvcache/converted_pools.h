// SPDX-License-Identifier: Apache-2.0
// Two pools in host memory, the first with random bytes, and the comparison of a moved request.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fovea/kv_cache.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/rows.h"

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

// Two pools of make_kv_pool() and the pages of a request in each: all but page 0 and the last one,
// in another order.
class PoolPair {
 public:
  PoolPair(const KvCacheSpec& from, const KvCacheSpec& to, int64_t tokens)
      : from_(make_kv_pool(from, tokens / from.page_size + 3)),
        to_(make_kv_pool(to, tokens / to.page_size + 3)),
        from_pages_(pages_of(*from_)),
        to_pages_(pages_of(*to_)) {}

  KvPool& from() const { return *from_; }
  KvPool& to() const { return *to_; }
  const std::vector<int64_t>& from_pages() const { return from_pages_; }
  const std::vector<int64_t>& to_pages() const { return to_pages_; }

 protected:
  // Calls expect_token(slot of `from`, slot of `to`) for the request's tokens. The other slots of
  // `to` have their zeros.
  template <typename Body>
  void expect_tokens(int64_t tokens, const Body& expect_token) const {
    std::vector<bool> is_written(static_cast<size_t>(to_->pages() * to_->spec().page_size));
    for (int64_t token = 0; token < tokens; ++token) {
      const int64_t slot = slot_of(*to_, to_pages_, token);
      is_written[static_cast<size_t>(slot)] = true;
      expect_token(slot_of(*from_, from_pages_, token), slot);
      if (testing::Test::HasFailure()) FAIL() << "token " << token;
    }
    for (size_t slot = 0; slot < is_written.size(); ++slot) {
      if (is_written[slot]) continue;
      for (const char byte : PoolBytes::of_token(*to_, static_cast<int64_t>(slot))) {
        ASSERT_EQ(byte, 0) << "slot " << slot;
      }
    }
  }

 private:
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

// Pools of equal rows. The first one has random bytes.
class ConvertedPools : public PoolPair {
 public:
  explicit ConvertedPools(const ConvertCase& c) : PoolPair(c.from, converted(c), 64) {
    std::mt19937 random(7);
    for (int64_t slot = 0; slot < from().pages() * from().spec().page_size; ++slot) {
      PoolBytes::for_rows(from(), slot, [&](char* row, size_t count) {
        for (size_t i = 0; i < count; ++i) row[i] = static_cast<char>(random() % 255 + 1);
      });
    }
  }

  void expect_moved(int64_t tokens) const {
    expect_tokens(tokens, [&](int64_t from_slot, int64_t to_slot) {
      EXPECT_EQ(PoolBytes::of_token(to(), to_slot), PoolBytes::of_token(from(), from_slot));
    });
  }

 private:
  static KvCacheSpec converted(const ConvertCase& c) {
    KvCacheSpec spec = c.from;
    spec.page_size = c.to_page_size;
    spec.order = c.to_order;
    return spec;
  }
};

// Pools whose rows have other dtypes or scales.
struct ValueCase {
  const char* name;
  KvCacheSpec from, to;
  bool on_gpus = true;
};

inline std::string name_of_values(const testing::TestParamInfo<ValueCase>& info) {
  return info.param.name;
}

// Between all 16-bit and 32-bit types, to and from fp8 with and without scales, latents, and rows
// of 656 bytes.
inline std::vector<ValueCase> value_cases() {
  const KvCacheSpec heads{
      .layers = 2, .kv_heads = 3, .head_dim = 24, .head_dim_v = 16, .page_size = 16};
  const auto cache = [](KvCacheSpec spec, DType dtype, KvScale scale, int32_t page_size,
                        KvOrder order) {
    spec.dtype = dtype;
    spec.scale = scale;
    spec.page_size = page_size;
    spec.order = order;
    return spec;
  };
  const auto plain = [&](DType dtype, int32_t page_size, KvOrder order) {
    return cache(heads, dtype, KvScale::none, page_size, order);
  };
  const auto scaled = [&](DType dtype, int32_t page_size, KvOrder order) {
    return cache(heads, dtype, KvScale::per_token_head, page_size, order);
  };
  using enum DType;
  using enum KvOrder;
  KvCacheSpec mla{.layout = KvLayout::mla,
                  .dtype = bf16,
                  .layers = 1,
                  .kv_heads = 1,
                  .head_dim = 576,
                  .head_dim_v = 512,
                  .page_size = 64};
  KvCacheSpec scaled_mla = cache(mla, f8e4m3, KvScale::per_token_head, 16, nhd);
  KvCacheSpec rows = cache(mla, f8e4m3, KvScale::none, 32, nhd);
  rows.layout = KvLayout::mla_fp8_rows;
  return {{"bf16_to_f16", plain(bf16, 16, nhd), plain(f16, 16, nhd)},
          {"f16_to_bf16", plain(f16, 16, hnd), plain(bf16, 24, nhd)},
          {"f32_to_bf16", plain(f32, 16, nhd), plain(bf16, 64, hnd)},
          {"f32_to_f16", plain(f32, 4, nhd), plain(f16, 16, nhd)},
          {"bf16_to_f32", plain(bf16, 16, nhd), plain(f32, 16, nhd)},
          {"bf16_to_e4m3", plain(bf16, 16, nhd), plain(f8e4m3, 16, nhd)},
          {"bf16_to_scaled_e4m3", plain(bf16, 16, hnd), scaled(f8e4m3, 8, nhd)},
          {"f16_to_scaled_e5m2", plain(f16, 16, nhd), scaled(f8e5m2, 16, hnd)},
          {"scaled_e4m3_to_bf16", scaled(f8e4m3, 16, nhd), plain(bf16, 16, nhd)},
          {"scaled_e4m3_to_e5m2", scaled(f8e4m3, 16, nhd), plain(f8e5m2, 16, nhd)},
          {"e5m2_to_scaled_e4m3", plain(f8e5m2, 16, nhd), scaled(f8e4m3, 16, nhd)},
          {"latents_to_scaled_e4m3", mla, scaled_mla},
          {"scaled_latents_to_bf16", scaled_mla, mla},
          {"latents_to_rows", mla, rows, false},
          {"rows_to_latents", rows, mla, false}};
}

class ValuePools : public PoolPair {
 public:
  explicit ValuePools(const ValueCase& c) : PoolPair(c.from, c.to, 304) { fill(); }

  // Every value differs from that of the sender by half of a unit in the last place, and nothing
  // else was written.
  void expect_rounded(int64_t tokens) const {
    expect_tokens(tokens, [&](int64_t from_slot, int64_t to_slot) {
      for_rows([&](int32_t layer, int32_t head, bool is_value) {
        expect_near(row(from(), {layer, from_slot, head, is_value}),
                    row(to(), {layer, to_slot, head, is_value}));
      });
    });
  }

 private:
  struct RowPlace {
    int32_t layer;
    int64_t slot;
    int32_t head;
    bool is_value;
  };

  template <typename Body>
  void for_rows(const Body& body) const {
    const KvCacheSpec& spec = from().spec();
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
      for (int32_t head = 0; head < spec.kv_heads; ++head) {
        body(layer, head, false);
        if (spec.layout == KvLayout::mha) body(layer, head, true);
      }
    }
  }

  // Values of any magnitude that all types hold, zeros, and rows of zeros.
  void fill() const {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const KvCacheSpec& spec = from().spec();
    const int64_t slots = from().pages() * spec.page_size;
    std::vector<int64_t> all;
    for (int64_t slot = spec.page_size; slot < slots; ++slot) all.push_back(slot);
    const bool is_mha = spec.layout == KvLayout::mha;
    const int64_t count = static_cast<int64_t>(all.size()) * spec.kv_heads;
    std::vector<float> keys(static_cast<size_t>(count * spec.head_dim)),
        values(static_cast<size_t>(is_mha ? count * spec.head_dim_v : 0));
    for (int32_t layer = 0; layer < spec.layers; ++layer) {
      const auto draw = [&](std::vector<float>& to, int32_t dim) {
        for (size_t i = 0; i < to.size(); ++i) {
          const size_t row = i / static_cast<size_t>(dim);
          const float magnitude = std::ldexp(1.0f, static_cast<int>(row % 7) - 3);
          to[i] = row % 11 == 5 ? 0.0f : magnitude * normal(random);
        }
      };
      draw(keys, spec.head_dim);
      draw(values, spec.head_dim_v);
      kernels::KvWriteParams params;
      params.cache = from().layer(layer);
      params.slots = all.data();
      params.tokens = static_cast<int32_t>(all.size());
      params.kv_heads = spec.kv_heads;
      params.k = dense_rows(keys.data(), DType::f32, spec.kv_heads, spec.head_dim);
      params.head_dim = is_mha ? spec.head_dim : spec.head_dim_v;
      params.head_dim_v = is_mha ? spec.head_dim_v : spec.head_dim - spec.head_dim_v;
      params.v = is_mha ? dense_rows(values.data(), DType::f32, spec.kv_heads, spec.head_dim_v)
                        : HeadRows{keys.data() + spec.head_dim_v, DType::f32, spec.head_dim,
                                   spec.head_dim};
      kernels::reference::kv_write(params);
    }
  }

  static std::vector<double> row(const KvPool& pool, const RowPlace& place) {
    const KvCacheSpec& spec = pool.spec();
    const int32_t dim = place.is_value ? spec.head_dim_v : spec.head_dim;
    std::vector<double> values(static_cast<size_t>(dim));
    const kernels::reference::CacheRow at{place.slot, place.head, spec.kv_heads};
    const KvLayerView view = pool.layer(place.layer);
    if (place.is_value) {
      kernels::reference::load_v_row(view, at, dim, values.data());
    } else {
      kernels::reference::load_k_row(view, at, dim, values.data());
    }
    return values;
  }

  // Half a unit of the receiver's dtype, relative to a value and in the range of subnormals.
  struct Unit {
    double relative, smallest, largest;
  };
  static Unit unit_of(DType dtype) {
    switch (dtype) {
      case DType::f16:
        return {0x1p-11, 0x1p-25, 65504};
      case DType::bf16:
        return {0x1p-8, 0, 3.4e38};
      case DType::f8e4m3:
        return {0x1p-4, 0x1p-10, 448};
      case DType::f8e5m2:
        return {0x1p-3, 0x1p-17, 57344};
      default:
        return {0x1p-24, 0, 3.4e38};
    }
  }

  void expect_near(const std::vector<double>& want, const std::vector<double>& got) const {
    const KvCacheSpec& spec = to().spec();
    const bool is_joined = spec.layout == KvLayout::mla_fp8_rows;
    for (size_t i = 0; i < want.size(); ++i) {
      const bool is_rope = is_joined && i >= 512;
      const Unit unit = unit_of(is_rope ? DType::bf16 : spec.dtype);
      double scale = 1;
      if (spec.scale == KvScale::per_token_head || (is_joined && !is_rope)) {
        const size_t first = is_joined ? i / 128 * 128 : 0;
        const size_t end = is_joined ? first + 128 : want.size();
        double largest = 0;
        for (size_t j = first; j < end; ++j) largest = std::max(largest, std::fabs(want[j]));
        scale = largest / unit.largest;
      }
      // Scales are f32.
      const double limit =
          std::max(std::fabs(want[i]) * unit.relative, scale * unit.smallest) * (1 + 1e-4);
      ASSERT_NEAR(got[i], want[i], limit) << "value " << i;
    }
  }
};

}  // namespace fovea::test
