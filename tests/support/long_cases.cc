// SPDX-License-Identifier: Apache-2.0
#include "support/long_cases.h"

#include <fmt/core.h>

#include <algorithm>
#include <string>
#include <utility>

#include "support/cases.h"

namespace fovea::test {
namespace {

using Cases = std::vector<AttentionCase>;

// Cases with several tiles and CTAs per request, and tiles that several CTAs share, in which GPU
// kernels differ from the small cases. The oracle takes half a minute of one core for them.
template <typename Change>
void add_long(Cases& cases, const std::string& name, int32_t q_heads, int32_t kv_heads,
              int32_t head_dim, Change&& change) {
  AttentionCase test = mha_case(fmt::format("long_{}", name), q_heads, kv_heads, head_dim);
  test.spec.q_dtype = test.cache.dtype = DType::bf16;
  test.cache.page_size = 64;
  test.requests = {{300, 300}, {1, 6000}, {5, 2000}, {0, 0}, {64, 64}, {1, 1}, {131, 1400}};
  change(test);
  cases.push_back(test);
}

// Cases of pages of any size, and of one token: windows, padded heads, several row tiles per block,
// no group, fp16.
void long_pages(Cases& cases) {
  add_long(cases, "mixed", 8, 2, 128, [](AttentionCase&) {});
  add_long(cases, "mixed_fp16", 8, 2, 128,
           [](AttentionCase& test) { test.spec.q_dtype = test.cache.dtype = DType::f16; });
  for (const int32_t page_size : {1, 2, 3, 16, 48, 128}) {
    add_long(cases, fmt::format("page_{}", page_size), 8, 2, 128,
             [&](AttentionCase& test) { test.cache.page_size = page_size; });
  }
  const auto add_tokens = [&](std::string name, int32_t q_heads, int32_t head_dim, auto&& change) {
    add_long(cases, "page_1_" + name, q_heads, 2, head_dim, [&](AttentionCase& test) {
      test.cache.page_size = 1;
      change(test);
    });
  };
  add_tokens("window", 8, 128, [](AttentionCase& test) { test.spec.window = 500; });
  add_tokens("dim_96_80", 8, 96, [](AttentionCase& test) { test.spec.head_dim_v = 80; });
  add_tokens("dim_64", 8, 64, [](AttentionCase&) {});
  add_tokens("dim_256", 2, 256, [](AttentionCase&) {});
  add_tokens("fp16", 8, 128,
             [](AttentionCase& test) { test.spec.q_dtype = test.cache.dtype = DType::f16; });
  add_tokens("prefill", 8, 128, [](AttentionCase& test) {
    test.mode = ForwardMode::extend;
    test.requests = {{150, 900}, {0, 0}, {257, 400}, {1, 1}};
    for (int32_t i = 0; i < 40; ++i) test.requests.push_back({64, 64 + i});
  });
  add_long(cases, "hnd", 8, 2, 128, [](AttentionCase& test) { test.cache.order = KvOrder::hnd; });
}

void long_decodes(Cases& cases) {
  add_long(cases, "decode", 32, 8, 128, [](AttentionCase& test) {
    test.mode = ForwardMode::decode;
    test.requests = {{1, 9000}, {1, 3}, {1, 2500}};
  });
  // Parts of two and three steps in a cluster.
  for (const int32_t page_size : {1, 64}) {
    add_long(cases, fmt::format("decode_alike_page_{}", page_size), 32, 8, 128,
             [&](AttentionCase& test) {
               test.mode = ForwardMode::decode;
               test.cache.page_size = page_size;
               test.requests.assign(7, {1, 522});
             });
  }
  add_long(cases, "decode_of_many", 4, 1, 128, [](AttentionCase& test) {
    test.mode = ForwardMode::decode;
    test.requests.clear();
    for (int32_t i = 0; i < 300; ++i)
      test.requests.push_back({i % 7 == 6 ? 0 : 1, 1 + i * 37 % 500});
  });
  // So many requests that a work item has several kv heads, and a block has items without keys
  // among others; fp8 with a scale per token and head.
  for (const auto& [kv_heads, page_size] : {std::pair{2, 16}, {8, 1}, {8, 64}, {16, 16}}) {
    for (const DType stored : {DType::bf16, DType::f8e4m3}) {
      add_long(cases,
               fmt::format("decode_of_many_{}_kv_heads_{}_page_{}", dtype_name(stored), kv_heads,
                           page_size),
               kv_heads, kv_heads, 128, [&](AttentionCase& test) {
                 test.mode = ForwardMode::decode;
                 test.cache.dtype = stored;
                 test.cache.page_size = page_size;
                 if (is_fp8(stored)) test.cache.scale = KvScale::per_token_head;
                 test.requests.clear();
                 for (int32_t i = 0; i < 100; ++i)
                   test.requests.push_back({i % 9 != 8, i % 13 == 5 ? 0 : 1 + i * 37 % 400});
               });
    }
  }
}

// Cases of prompts, groups and head dims.
void long_prompts(Cases& cases) {
  add_long(cases, "prefill", 8, 2, 128, [](AttentionCase& test) {
    test.mode = ForwardMode::extend;
    test.requests = {{700, 700}, {1, 1}, {257, 900}};
  });
  for (const auto& [q_heads, kv_heads] : {std::pair{4, 4}, {7, 1}, {16, 1}, {64, 1}}) {
    add_long(cases, fmt::format("group_{}", q_heads / kv_heads), q_heads, kv_heads, 128,
             [](AttentionCase& test) {
               test.requests = {{200, 333}, {1, 1500}, {9, 900}};
             });
  }
  // Row tiles of 256 tokens of one head: half of their rows do not see the last key tile.
  for (const DType dtype : {DType::bf16, DType::f16}) {
    add_long(cases, fmt::format("own_heads_{}", dtype_name(dtype)), 10, 10, 128,
             [&](AttentionCase& test) {
               test.mode = ForwardMode::extend;
               test.spec.q_dtype = test.cache.dtype = dtype;
               test.requests = {{1030, 1100}, {131, 400}};
               for (int32_t i = 0; i < 40; ++i) test.requests.push_back({64, 64 + i});
             });
    if (dtype != DType::bf16) continue;
    add_long(cases, "own_heads_dim_256", 10, 10, 256, [&](AttentionCase& test) {
      test.mode = ForwardMode::extend;
      test.requests = {{1030, 1100}, {131, 400}};
      for (int32_t i = 0; i < 40; ++i) test.requests.push_back({64, 64 + i});
    });
    // Enough tokens that a host without lengths pairs row tiles.
    add_long(cases, "own_heads_dim_192_128", 5, 5, 192, [&](AttentionCase& test) {
      test.spec.head_dim_v = 128;
      test.mode = ForwardMode::extend;
      test.requests = {{700, 770}, {131, 400}};
      for (int32_t i = 0; i < 250; ++i) test.requests.push_back({64, 64 + i % 40});
    });
    add_long(cases, "own_heads_cascade", 10, 10, 128, [&](AttentionCase& test) {
      test.spec.q_dtype = test.cache.dtype = dtype;
      test.requests = {{1030, 1286}};
      for (int32_t i = 0; i < 38; ++i) test.requests.push_back({64, 320 + i});
      for (int32_t i = 0; i < 8; ++i) test.requests.push_back({1 + i % 2, 260 + 9 * i});
      test.requests.resize(112, {0, 256});  // so many requests let so many tokens have groups
      test.shared_prefix = 256;
      test.prefix_levels = 1;
      test.mode = ForwardMode::extend;
    });
  }
  constexpr int32_t kDims[][2] = {{64, 64}, {80, 80}, {96, 96}, {192, 192}, {192, 128}, {256, 256}};
  for (const auto& [dim, dim_v] : kDims) {
    add_long(cases, fmt::format("dim_{}_{}", dim, dim_v), 4, 1, dim,
             [dim_v = dim_v](AttentionCase& test) { test.spec.head_dim_v = dim_v; });
  }
}

// Cases of few row tiles over many keys, which GPUs divide: parts that begin inside key tiles,
// whole row tiles among them, rows that see no key of a part.
void long_split(Cases& cases) {
  // Each case twice: unchanged, and with at most 64 packed rows per request.
  const auto add = [&](const std::string& name, int32_t head_dim, auto&& change) {
    const auto as_extend = [&](AttentionCase& test) {
      test.mode = ForwardMode::extend;
      test.requests = {{24, 5000}, {100, 1700}, {1, 500}, {0, 0}, {40, 40}, {131, 1400}};
      change(test);
    };
    add_long(cases, "split_" + name, 8, 2, head_dim, as_extend);
    add_long(cases, "split_few_" + name, 8, 2, head_dim, [&](AttentionCase& test) {
      as_extend(test);
      const int32_t most = 64 / (test.spec.q_heads / test.spec.kv_heads);
      for (RequestShape& shape : test.requests) shape.q_len = std::min(shape.q_len, most);
    });
  };
  for (const int32_t page_size : {1, 3, 16, 64}) {
    add(fmt::format("page_{}", page_size), 128,
        [&](AttentionCase& test) { test.cache.page_size = page_size; });
  }
  add("fp16", 128, [](AttentionCase& test) { test.spec.q_dtype = test.cache.dtype = DType::f16; });
  add("sinks", 128, [](AttentionCase& test) { test.spec.scores.has_sinks = true; });
  add("growing", 128, [](AttentionCase& test) { test.growing_scores = true; });
  add("growing_slowly", 128, [](AttentionCase& test) {
    test.growing_scores = true;
    test.growth_tokens = 1000;
  });
  add("group_1", 128, [](AttentionCase& test) { test.spec.q_heads = 2; });
  add("group_8", 128, [](AttentionCase& test) {
    test.spec.q_heads = 16;
    test.requests = {{24, 5000}, {100, 1700}, {131, 1400}};
  });
  for (const int32_t dim : {64, 80, 256}) {
    add(fmt::format("dim_{}", dim), dim, [](AttentionCase&) {});
  }
  add("tree", 128, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.requests = {{40, 3000}, {64, 1700}, {33, 1433}, {40, 40}};
  });
  add("custom", 128, [](AttentionCase& test) { test.spec.mask = MaskKind::custom; });
  for (const KvScale scale : kScales) {
    for (const int32_t page_size : {1, 64}) {
      add(fmt::format("fp8_{}_page_{}", scale_name(scale), page_size), 128,
          [&](AttentionCase& test) {
            test.cache.dtype = DType::f8e4m3;
            test.cache.scale = scale;
            test.cache.page_size = page_size;
          });
    }
  }
}

// Cases of 17 to 32 packed rows per request, whose keys are divided, because the bounds allow it.
void long_drafts(Cases& cases) {
  const auto add = [&](const char* name, auto&& change) {
    add_long(cases, std::string("drafts_") + name, 8, 4, 128, [&](AttentionCase& test) {
      test.mode = ForwardMode::target_verify;
      test.cache.page_size = 64;
      test.requests = {{12, 4400}, {12, 700}, {9, 300}, {3, 900},
                       {1, 150},   {0, 0},    {12, 12}, {5, 1000}};
      change(test);
    });
  };
  add("causal", [](AttentionCase&) {});
  add("tree", [](AttentionCase& test) { test.spec.mask = MaskKind::tree; });
  add("growing_sinks",
      [](AttentionCase& test) { test.growing_scores = test.spec.scores.has_sinks = true; });
  add("fp8_page_1", [](AttentionCase& test) {
    test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_token_head;
    test.cache.page_size = 1;
    for (RequestShape& request : test.requests) request.kv_len *= 2;  // keys have half the bytes
  });
}

void long_masks(Cases& cases) {
  add_long(cases, "window", 8, 2, 128, [](AttentionCase& test) { test.spec.window = 500; });
  add_long(cases, "window_pool", 8, 2, 128, [](AttentionCase& test) {
    test.spec.window = 300;
    test.window_pool = true;
  });
  add_long(cases, "chunk", 8, 2, 128, [](AttentionCase& test) { test.spec.chunk = 512; });
  add_long(cases, "sinks_cap", 8, 2, 128, [](AttentionCase& test) {
    test.spec.scores.has_sinks = true;
    test.spec.scores.logit_cap = 30;
  });
  add_long(cases, "alibi", 8, 2, 128,
           [](AttentionCase& test) { test.spec.scores.has_alibi = true; });
  add_long(cases, "tree", 8, 2, 128, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.requests = {{15, 3000}, {15, 15}, {15, 400}};
  });
  // Trees over window pools, in the shapes of gemma2 and gpt_oss among others.
  for (const auto& [name, kv_heads, dim] : {std::tuple{"window_pool_tree", 2, 128},
                                            {"window_pool_tree_cap_dim_256", 4, 256},
                                            {"window_pool_tree_sinks_dim_64", 1, 64}}) {
    add_long(cases, name, 8, kv_heads, dim, [&](AttentionCase& test) {
      test.spec.mask = MaskKind::tree;
      test.mode = ForwardMode::target_verify;
      test.spec.window = 300;
      test.window_pool = true;
      test.spec.scores.logit_cap = dim == 256 ? 30 : 0;
      test.spec.scores.has_sinks = dim == 64;
      test.requests = {{15, 3000}, {15, 15}, {15, 400}, {40, 1700}, {3, 310}};
    });
  }
  add_long(cases, "custom", 8, 2, 128, [](AttentionCase& test) {
    test.spec.mask = MaskKind::custom;
    test.requests = {{150, 1200}, {1, 2000}};
  });
  add_long(cases, "encoder", 8, 2, 128, [](AttentionCase& test) {
    test.spec.scope = AttentionScope::encoder;
    test.mode = ForwardMode::extend;
    test.requests = {{500, 500}, {1, 1}, {300, 300}};
  });
  add_long(cases, "ragged", 8, 2, 128, [](AttentionCase& test) {
    test.spec.scope = AttentionScope::ragged;
    test.mode = ForwardMode::extend;
    test.requests = {{500, 500}, {1, 1}, {300, 300}};
  });
  // Prompts of MLA, with more row tiles than multiprocessors, and with fewer.
  for (const auto& [name, heads] :
       {std::pair{"ragged_dim_192_128", 16}, {"ragged_few_dim_192_128", 2}}) {
    add_long(cases, name, heads, heads, 192, [](AttentionCase& test) {
      test.spec.scope = AttentionScope::ragged;
      test.spec.head_dim_v = 128;
      test.mode = ForwardMode::extend;
      test.requests = {{500, 500}, {1, 1}, {300, 300}};
    });
  }
  // Few row tiles over many keys, which GPUs divide.
  add_long(cases, "ragged_split_dim_192_128", 1, 1, 192, [](AttentionCase& test) {
    test.spec.scope = AttentionScope::ragged;
    test.spec.head_dim_v = 128;
    test.mode = ForwardMode::extend;
    test.requests = {{1500, 1500}, {1, 1}, {70, 70}};
  });
  add_long(cases, "cross", 8, 2, 128, [](AttentionCase& test) {
    test.spec.scope = AttentionScope::cross;
    test.requests = {{1, 1500}, {200, 700}, {1, 0}};
  });
}

void long_invariant(Cases& cases) {
  const auto add_invariant = [&](std::string name, int32_t head_dim, auto&& change) {
    add_long(cases, fmt::format("invariant_{}", name), 8, 2, head_dim, [&](AttentionCase& test) {
      test.spec.batch_invariant = true;
      change(test);
    });
  };
  add_invariant("mixed", 128, [](AttentionCase&) {});
  add_invariant("fp16", 128,
                [](AttentionCase& test) { test.spec.q_dtype = test.cache.dtype = DType::f16; });
  add_invariant("dim_80_64", 80, [](AttentionCase& test) { test.spec.head_dim_v = 64; });
  add_invariant("dim_64", 64, [](AttentionCase&) {});
  add_invariant("window", 128, [](AttentionCase& test) { test.spec.window = 1500; });
  add_invariant("sinks_cap", 128, [](AttentionCase& test) {
    test.spec.scores.has_sinks = true;
    test.spec.scores.logit_cap = 30;
  });
  add_invariant("decode", 128, [](AttentionCase& test) {
    test.mode = ForwardMode::decode;
    test.requests = {{1, 9000}, {1, 3}, {1, 2500}, {1, 0}};
  });
  add_invariant("verify", 128, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.requests = {{15, 3000}, {15, 15}, {15, 1400}};
  });
}

void long_fp8_caches(Cases& cases) {
  for (const KvScale scale : kScales) {
    const auto add_fp8 = [&](std::string name, int32_t head_dim, auto&& change) {
      name = fmt::format("fp8_{}{}", scale_name(scale), name);
      add_long(cases, name, 8, 2, head_dim, [&](AttentionCase& test) {
        test.cache.dtype = DType::f8e4m3;
        test.cache.scale = scale;
        change(test);
      });
    };
    add_fp8("", 128, [](AttentionCase&) {});
    add_fp8("_page_1", 128, [](AttentionCase& test) { test.cache.page_size = 1; });
    add_fp8("_fp16_page_3", 128, [](AttentionCase& test) {
      test.spec.q_dtype = DType::f16;
      test.cache.page_size = 3;
    });
    add_fp8("_dim_64", 64, [](AttentionCase&) {});
    add_fp8("_dim_256", 256, [](AttentionCase&) {});
    add_fp8("_window", 128, [](AttentionCase& test) { test.spec.window = 500; });
    add_fp8("_chunk", 128, [](AttentionCase& test) { test.spec.chunk = 512; });
    add_fp8("_sinks_cap_alibi", 128, [](AttentionCase& test) {
      test.spec.scores.has_sinks = test.spec.scores.has_alibi = true;
      test.spec.scores.logit_cap = 30;
    });
    add_fp8("_custom", 128, [](AttentionCase& test) {
      test.spec.mask = MaskKind::custom;
      test.requests = {{150, 1200}, {1, 2000}};
    });
    add_fp8("_tree", 128, [](AttentionCase& test) {
      test.spec.mask = MaskKind::tree;
      test.mode = ForwardMode::target_verify;
      test.requests = {{15, 3000}, {15, 15}, {15, 400}};
    });
    if (scale == KvScale::per_token_head) continue;
    add_fp8("_q_fp8", 128, [](AttentionCase& test) { test.spec.q_dtype = DType::f8e4m3; });
    add_fp8("_q_fp8_prefill", 128, [](AttentionCase& test) {
      test.spec.q_dtype = DType::f8e4m3;
      test.mode = ForwardMode::extend;
      test.requests = {{700, 700}, {1, 1}, {257, 900}};
    });
  }
}

}  // namespace

void add_long_cases(std::vector<AttentionCase>& cases) {
  long_pages(cases);
  long_decodes(cases);
  long_prompts(cases);
  long_split(cases);
  long_drafts(cases);
  long_masks(cases);
  long_invariant(cases);
  long_fp8_caches(cases);
}

}  // namespace fovea::test
