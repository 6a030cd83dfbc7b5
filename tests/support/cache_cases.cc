// SPDX-License-Identifier: Apache-2.0
#include "support/cache_cases.h"

#include <fmt/core.h>

#include "attention/names.h"
#include "support/cases.h"
#include "support/test_device.h"

namespace fovea::test {
namespace {

using Cases = std::vector<AttentionCase>;

void formats(Cases& cases) {
  constexpr DType kQueries[] = {DType::f32, DType::f16, DType::bf16};
  constexpr DType kStored[] = {DType::f32, DType::f16, DType::bf16, DType::f8e4m3, DType::f8e5m2};
  for (DType query : kQueries) {
    for (DType stored : kStored) {
      AttentionCase test =
          mha_case(fmt::format("q_{}_kv_{}", dtype_name(query), dtype_name(stored)), 6, 2, 64);
      test.spec.q_dtype = query;
      test.cache.dtype = stored;
      test.cache.order = stored == DType::f16 ? KvOrder::hnd : KvOrder::nhd;
      cases.push_back(test);
      if (!is_fp8(stored)) continue;
      const std::string name = test.name;
      test.name = name + "_per_tensor";
      test.cache.scale = KvScale::per_tensor;
      cases.push_back(test);
      test.name = name + "_per_head";
      test.cache.scale = KvScale::per_head;
      cases.push_back(test);
      test.name = name + "_per_token_head";
      test.cache.scale = KvScale::per_token_head;
      test.cache.order = KvOrder::hnd;
      cases.push_back(test);
    }
  }
}

// Cases of fp8 queries over fp8 caches.
void fp8_products(Cases& cases) {
  const auto add = [&](std::string name, auto&& change) {
    AttentionCase test = mixed_case("q_fp8_" + name, 4, 2, 128);
    test.spec.q_dtype = test.cache.dtype = DType::f8e4m3;
    change(test);
    cases.push_back(test);
  };
  for (const KvScale scale : kScales) {
    add(scale_name(scale), [scale](AttentionCase& test) { test.cache.scale = scale; });
  }
  add("page_3", [](AttentionCase& test) { test.cache.page_size = 3; });
  add("head_dim_64", [](AttentionCase& test) { test.spec.head_dim = test.spec.head_dim_v = 64; });
  add("head_dim_192_112", [](AttentionCase& test) {
    test.spec.head_dim = 192;
    test.spec.head_dim_v = 112;
  });
  add("group_7", [](AttentionCase& test) { test.spec.q_heads = 14; });
  add("window", [](AttentionCase& test) { test.spec.window = 20; });
  add("chunk_hnd", [](AttentionCase& test) {
    test.spec.chunk = 16;
    test.cache.order = KvOrder::hnd;
  });
  add("cap_sinks_alibi", [](AttentionCase& test) {
    test.spec.scores.logit_cap = 8;
    test.spec.scores.has_sinks = test.spec.scores.has_alibi = true;
  });
  // Scales whose powers leave the range of floats: scores up to 0.74 of the cap, and above it.
  for (const float cap : {50.0f, 15.0f}) {
    add(cap == 50 ? "cap_large_codes" : "cap_far_large_codes", [cap](AttentionCase& test) {
      test.requests = {{70, 300}, {33, 33}, {1, 200}, {129, 130}};
      test.spec.scores.logit_cap = cap;
      test.spec.scores.softmax_scale = 0.125f;
      test.cache.scale = KvScale::per_tensor;
      test.large_codes = true;
    });
  }
  // The maximum of rows grows beyond the base of their weights: at once, and many key tiles later.
  for (const int32_t tokens : {64, 300}) {
    add(fmt::format("growing_scores_{}", tokens), [tokens](AttentionCase& test) {
      test.requests = {{150, 900}, {290, 290}, {1, 700}, {70, 500}};
      test.growing_scores = true;
      test.growth_tokens = tokens;
      test.cache.page_size = 64;
    });
  }
  add("growing_scores_slightly", [](AttentionCase& test) {
    test.requests = {{150, 900}, {290, 290}, {1, 700}, {70, 500}};
    test.growing_scores = true;
    test.growth_tokens = 250;
    test.spec.scores.softmax_scale = 0.006f;
  });
  add("growing_scores_window", [](AttentionCase& test) {
    test.requests = {{150, 900}, {290, 290}, {200, 700}};
    test.growing_scores = true;
    test.spec.window = 250;
  });
  add("custom", [](AttentionCase& test) { test.spec.mask = MaskKind::custom; });
  add("cascade", [](AttentionCase& test) {
    test.requests = {{1, 700}, {1, 609}, {3, 850}, {1, 640}, {20, 700}};
    test.shared_prefix = 608;
    test.prefix_levels = 1;
  });
  add("decode", [](AttentionCase& test) {
    test.mode = ForwardMode::decode;
    test.requests = {{1, 97}, {1, 1}, {1, 40}};
  });
}

// Cases of fp8 caches with wide pages: kernels that copy whole pages also find scales by page.
void fp8_pages(Cases& cases) {
  const auto add = [&](std::string name, auto&& change) {
    AttentionCase test = mixed_case("fp8_pages_" + name, 4, 2, 128);
    test.spec.q_dtype = DType::bf16;
    test.cache.dtype = DType::f8e4m3;
    test.cache.page_size = 16;
    test.requests = {{70, 300}, {33, 33}, {1, 200}, {129, 130}, {64, 257}};
    change(test);
    cases.push_back(test);
  };
  for (const KvScale scale : kScales) {
    add(scale_name(scale), [scale](AttentionCase& test) { test.cache.scale = scale; });
  }
  add("scaled_64", [](AttentionCase& test) {
    test.cache.page_size = 64;
    test.cache.scale = KvScale::per_token_head;
  });
  add("scaled_48_hnd", [](AttentionCase& test) {
    test.cache.page_size = 48;
    test.cache.scale = KvScale::per_token_head;
    test.cache.order = KvOrder::hnd;
  });
  add("e5m2_head_dim_96", [](AttentionCase& test) {
    test.cache.dtype = DType::f8e5m2;
    test.spec.head_dim = test.spec.head_dim_v = 96;
  });
  add("window", [](AttentionCase& test) {
    test.spec.window = 40;
    test.cache.scale = KvScale::per_token_head;
  });
  add("cap_alibi", [](AttentionCase& test) {
    test.spec.scores.logit_cap = 8;
    test.spec.scores.has_alibi = true;
    test.cache.scale = KvScale::per_token_head;
  });
}

void storage(Cases& cases) {
  AttentionCase test = mixed_case("strided", 4, 2, 80);
  test.strided = true;
  cases.push_back(test);
  test.name = "strided_bf16_hnd";
  test.spec.q_dtype = DType::bf16;
  test.cache.dtype = DType::bf16;
  test.cache.order = KvOrder::hnd;
  cases.push_back(test);

  test = mixed_case("prewritten", 4, 2, 64);
  test.prewritten = true;
  cases.push_back(test);
  test = mixed_case("skip_some_writes", 4, 2, 64);
  test.skip_some_writes = true;
  cases.push_back(test);

  test = mha_case("shared_prefix", 4, 2, 64);
  test.requests = {{1, 90}, {5, 70}, {1, 65}};
  test.shared_prefix = 64;
  cases.push_back(test);

  test = mixed_case("window_pool", 4, 2, 64);
  test.spec.window = 24;
  test.window_pool = true;
  cases.push_back(test);
  test.name = "window_pool_page_3_sinks";
  test.cache.page_size = 3;
  test.spec.scores.has_sinks = true;
  cases.push_back(test);
  // Tokens that have left the window may be NaN, also under other masks. A GPU takes trees only.
  for (const MaskKind mask : {MaskKind::tree, MaskKind::custom, MaskKind::multi_item}) {
    if (on_gpu() && mask != MaskKind::tree) break;
    test = mixed_case(fmt::format("window_pool_{}", name_of(mask)), 4, 2, 64);
    test.spec.window = 24;
    test.window_pool = true;
    test.spec.mask = mask;
    if (mask == MaskKind::tree) {
      test.mode = ForwardMode::target_verify;
      test.requests = {{8, 120}, {8, 8}, {8, 65}};
    }
    cases.push_back(test);
  }

  if (on_gpu()) return;  // gigabytes between pages cannot be copied to a GPU
  // From the eighth page on, a page table entry times this exceeds 2^31 elements.
  test = mha_case("huge_page_stride", 2, 1, 64);
  test.page_stride = (int64_t{1} << 31) / 7;
  test.cache.dtype = DType::bf16;
  test.requests = {{1, 200}, {5, 70}};
  cases.push_back(test);
}

// Cases of shared prefixes that are read once.
void cascades(Cases& cases) {
  // Requests that share a prefix, first one level of it, then groups of three that share more, and
  // requests that share too little or nothing, or that have many new tokens.
  AttentionCase test = mha_case("cascade", 4, 1, 64);
  test.requests = {{1, 1800},  {1, 1699}, {3, 1720}, {1, 1700}, {1, 1900}, {1, 1696},
                   {40, 1750}, {0, 1700}, {1, 1710}, {2, 1688}, {1, 1800}};
  test.shared_prefix = 1680;
  test.prefix_levels = 1;
  cases.push_back(test);
  test.name = "cascade_sinks_cap_strided";
  test.spec.scores.has_sinks = true;
  test.spec.scores.logit_cap = 20;
  test.strided = true;
  cases.push_back(test);
  test.strided = false;
  test.spec.scores.has_sinks = false;
  test.spec.scores.logit_cap = 0;
  for (const int32_t levels : {1, 3}) {
    test.name = fmt::format("cascade_groups_{}_levels", levels);
    test.prefix_levels = levels;
    test.shared_prefix = 288;
    test.group_prefix = 608;
    test.group_size = 3;
    test.requests = {{1, 700}, {1, 609}, {1, 850}, {1, 640}, {1, 640}, {1, 611}, {1, 900}};
    cases.push_back(test);
  }
  for (const int32_t dim : {128, 256}) {
    test = mha_case(fmt::format("cascade_dim_{}", dim), 8, 2, dim);
    test.requests = {{1, 700}, {2, 609}, {1, 650}, {1, 640}, {3, 640}, {1, 611}};
    test.shared_prefix = 600;
    test.prefix_levels = 1;
    cases.push_back(test);
    if (dim > 128) continue;
    test.name = "cascade_page_1";
    test.cache.page_size = 1;
    cases.push_back(test);
    test.spec.q_dtype = DType::bf16;
    test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_token_head;
    for (const int32_t page_size : {1, 16}) {
      test.name = fmt::format("cascade_fp8_page_{}", page_size);
      test.cache.page_size = page_size;
      cases.push_back(test);
    }
    test.name = "cascade_fp8_per_head";
    test.cache.scale = KvScale::per_head;
    cases.push_back(test);
  }
  // Decode, prompts and groups in one pass of the maximum number of new tokens with groups, and of
  // one more.
  test = mha_case("cascade_mixed", 8, 2, 128);
  test.requests = {{1, 700}, {1, 609},  {19, 650}, {1, 640},
                   {2, 640}, {38, 700}, {1, 601},  {1, 680}};
  test.shared_prefix = 560;
  test.prefix_levels = 1;
  cases.push_back(test);
  test.name = "cascade_mixed_long";
  test.requests[2].q_len += 1;
  cases.push_back(test);
  test = mha_case("cascade_tree", 4, 1, 64);
  test.spec.mask = MaskKind::tree;
  test.mode = ForwardMode::target_verify;
  test.requests = {{7, 330}, {7, 400}, {7, 307}};
  test.shared_prefix = 288;
  test.prefix_levels = 1;
  cases.push_back(test);
  // Requests cannot share keys that a window hides.
  test = mha_case("cascade_window", 4, 1, 64);
  test.requests = {{1, 330}, {1, 400}, {1, 307}};
  test.spec.window = 100;
  test.shared_prefix = 288;
  test.prefix_levels = 2;
  cases.push_back(test);
}

// Cases of rotation on the way to the cache, whose bytes equal those of keys rotated before.
void rotations(Cases& cases) {
  AttentionCase test = mixed_case("rope", 4, 2, 64);
  test.spec.has_rope = true;
  cases.push_back(test);
  test.name = "rope_decode";
  test.mode = ForwardMode::decode;
  test.requests = {{1, 130}, {1, 1}, {0, 0}, {1, 17}};
  cases.push_back(test);

  test = mixed_case("rope_part_strided", 7, 1, 128);
  test.spec.has_rope = true;
  test.spec.q_dtype = test.cache.dtype = DType::bf16;
  test.rotary_dim = 20;
  test.strided = true;
  cases.push_back(test);
  test.name = "rope_interleaved";
  test.rotary_dim = 64;
  test.rope_interleaved = true;
  test.spec.q_dtype = test.cache.dtype = DType::f16;
  cases.push_back(test);
  test.name = "rope_fp8_dim_256";
  test.spec.head_dim = test.spec.head_dim_v = 256;
  test.spec.q_dtype = DType::bf16;
  test.cache.dtype = DType::f8e4m3;
  test.cache.scale = KvScale::per_token_head;
  test.rotary_dim = 0;
  test.strided = false;
  cases.push_back(test);

  test = mixed_case("rope_prewritten", 4, 2, 64);
  test.spec.has_rope = true;
  test.prewritten = true;
  cases.push_back(test);
  test.name = "rope_skip_some_writes";
  test.prewritten = false;
  test.skip_some_writes = true;
  cases.push_back(test);
  test.name = "rope_window_pool";
  test.skip_some_writes = false;
  test.spec.window = 24;
  test.window_pool = true;
  cases.push_back(test);
  test = mixed_case("rope_tree", 4, 2, 64);
  test.spec.has_rope = true;
  test.spec.mask = MaskKind::tree;
  test.mode = ForwardMode::target_verify;
  test.requests = {{8, 120}, {8, 8}};
  cases.push_back(test);
}

}  // namespace

void add_cache_cases(Cases& cases) {
  formats(cases);
  fp8_products(cases);
  fp8_pages(cases);
  storage(cases);
  cascades(cases);
  rotations(cases);
}

}  // namespace fovea::test
