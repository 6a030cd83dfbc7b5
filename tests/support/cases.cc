// SPDX-License-Identifier: Apache-2.0
#include "support/cases.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

#include "support/cache_cases.h"
#include "support/dual_chunk_cases.h"
#include "support/latent_cases.h"
#include "support/long_cases.h"
#include "support/random_cases.h"
#include "support/test_device.h"
#include "support/tile_cases.h"

namespace fovea::test {
namespace {

using Cases = std::vector<AttentionCase>;

constexpr int32_t kPageSizes[] = {1, 2, 3, 16, 32, 64, 128, 256};
constexpr int32_t kLengths[] = {0,  1,  2,   15,  16,  17,  63,   64,
                                65, 97, 127, 128, 129, 257, 1023, 4097};

// Returns lengths of decode, extend, prefill and empty requests.
const std::vector<RequestShape> kMixed = {{1, 130}, {7, 64}, {33, 150}, {20, 20},
                                          {1, 1},   {0, 20}, {0, 0},    {1, 0}};
const std::vector<RequestShape> kSmall = {{1, 97}, {5, 70}, {3, 3}};

constexpr int kRandomCases = 40;  // at scale 1

// Replaces fp32, which no GPU kernel supports.
void fit_test_device(AttentionCase& test) {
  if (!on_gpu()) return;
  for (DType* dtype : {&test.spec.q_dtype, &test.cache.dtype}) {
    if (*dtype == DType::f32) *dtype = DType::bf16;
  }
}

void lengths_and_pages(Cases& cases) {
  for (int32_t page_size : kPageSizes) {
    AttentionCase decode = mha_case(fmt::format("decode_page_{}", page_size), 4, 2, 64);
    decode.mode = ForwardMode::decode;
    decode.cache.page_size = page_size;
    decode.requests.clear();
    AttentionCase extend = decode;
    extend.name = fmt::format("extend_page_{}", page_size);
    extend.mode = ForwardMode::extend;
    for (int32_t length : kLengths) {
      decode.requests.push_back({1, length});
      if (length > 257 && test_scale() == 1) continue;
      extend.requests.push_back({std::min(length, 1 + length % 37), length});
    }
    cases.push_back(decode);
    cases.push_back(extend);
  }
}

void head_shapes(Cases& cases) {
  for (int32_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 28, 64, 128}) {
    const int32_t kv_heads = group <= 16 ? 2 : 1;
    AttentionCase test = mha_case(fmt::format("group_{}", group), group * kv_heads, kv_heads, 64);
    cases.push_back(test);
  }
  // Dims between the widths of GPU kernels are multiples of 8, too.
  constexpr int32_t kDims[][2] = {{64, 64},   {80, 80},   {96, 96},   {112, 112}, {128, 128},
                                  {192, 192}, {256, 256}, {192, 128}, {64, 128},  {40, 40},
                                  {72, 72},   {88, 88},   {104, 120}, {200, 248}};
  for (const auto& [dim, dim_v] : kDims) {
    AttentionCase test = mha_case(fmt::format("head_dim_{}_{}", dim, dim_v), 6, 2, dim);
    test.spec.head_dim_v = dim_v;
    cases.push_back(test);
  }
  AttentionCase test = mha_case("head_dim_192_128_page_1", 6, 2, 192);
  test.spec.head_dim_v = 128;
  test.cache.page_size = 1;
  cases.push_back(test);
}

void phases(Cases& cases) {
  AttentionCase test = mha_case("verify_chain", 8, 2, 64);
  test.mode = ForwardMode::target_verify;
  test.requests = {{4, 100}, {4, 4}, {4, 65}};
  cases.push_back(test);
  test.name = "draft_extend";
  test.mode = ForwardMode::extend;
  test.requests = {{1, 100}, {4, 68}, {2, 2}};
  cases.push_back(test);
  test.name = "prefill";
  test.mode = ForwardMode::extend;
  test.requests = {{129, 129}, {64, 64}, {1, 1}, {17, 17}};
  cases.push_back(test);
  test.name = "prefill_scale_given";
  test.spec.scores.softmax_scale = 0.3f;
  cases.push_back(test);
  cases.push_back(mixed_case("mixed", 4, 2, 64));
}

void masks(Cases& cases) {
  for (int32_t window : {1, 16, 100}) {
    AttentionCase test = mixed_case(fmt::format("window_{}", window), 4, 2, 64);
    test.spec.window = window;
    cases.push_back(test);
  }
  for (int32_t chunk : {1, 16, 48}) {
    AttentionCase test = mixed_case(fmt::format("chunk_{}", chunk), 4, 2, 64);
    test.spec.chunk = chunk;
    cases.push_back(test);
  }
  for (MaskKind mask :
       {MaskKind::tree, MaskKind::custom, MaskKind::prefix_spans, MaskKind::multi_item}) {
    constexpr std::string_view kNames[] = {"none", "tree", "custom", "prefix_spans", "multi_item"};
    AttentionCase test = mixed_case(std::string(kNames[static_cast<size_t>(mask)]), 4, 2, 64);
    test.spec.mask = mask;
    if (mask == MaskKind::tree) {
      test.mode = ForwardMode::target_verify;
      test.requests = {{8, 120}, {8, 8}, {8, 17}, {8, 65}};
    }
    cases.push_back(test);
    const std::string name = test.name;
    test.name = name + "_window";
    test.spec.window = 6;
    cases.push_back(test);
    test.name = name + "_chunk";
    test.spec.window = 0;
    test.spec.chunk = 10;
    cases.push_back(test);
  }
  AttentionCase common = mixed_case("multi_item_far_prefixes", 4, 2, 64);
  common.spec.mask = MaskKind::multi_item;
  common.far_item_prefixes = true;
  cases.push_back(common);
  common.name += "_moved";
  common.moved_tokens = true;
  cases.push_back(common);
  AttentionCase wide = mha_case("tree_of_64", 4, 1, 64);
  wide.spec.mask = MaskKind::tree;
  wide.mode = ForwardMode::target_verify;
  wide.requests = {{64, 90}, {64, 64}};
  cases.push_back(wide);
}

void scores(Cases& cases) {
  AttentionCase test = mixed_case("logit_cap", 4, 2, 64);
  test.spec.scores.logit_cap = 5;
  cases.push_back(test);
  test.name = "logit_cap_window";
  test.spec.window = 40;
  cases.push_back(test);
  // The LSE of a single key is its score: a large cap shows the error of its tanh near 0.
  test = mha_case("logit_cap_large", 8, 2, 128);
  test.spec.scores.logit_cap = 50;
  test.requests = {{1, 1}, {1, 2}, {2, 2}, {1, 90}};
  cases.push_back(test);
  test.name = "logit_cap_large_decode";
  test.mode = ForwardMode::decode;
  test.requests = {{1, 1}, {1, 2}, {1, 90}};
  cases.push_back(test);

  // The maximum of rows grows beyond the base of their weights several times.
  for (const int32_t dim : {64, 128, 256}) {
    test = mha_case(fmt::format("growing_scores_{}", dim), 8, 2, dim);
    test.growing_scores = true;
    test.mode = ForwardMode::extend;
    test.requests = {{150, 500}, {90, 90}, {3, 300}};
    cases.push_back(test);
  }
  // Growth by slightly more than weights may exceed their base, by 2^60, and beyond all floats;
  // also late in the row.
  for (const float scale : {0.008f, 0.035f, 0.12f}) {
    test = mha_case(fmt::format("growing_scores_scale_{}", std::lround(1000 * scale)), 8, 2, 128);
    test.growing_scores = true;
    test.growth_tokens = 250;
    test.spec.scores.softmax_scale = scale;
    test.mode = ForwardMode::extend;
    test.requests = {{200, 900}, {290, 290}, {3, 700}};
    cases.push_back(test);
  }

  test = mixed_case("sinks", 4, 2, 64);
  test.spec.scores.has_sinks = true;
  cases.push_back(test);
  test.name = "sinks_infinite";
  test.infinite_sinks = true;
  cases.push_back(test);
  test.name = "sinks_window";
  test.infinite_sinks = false;
  test.spec.window = 30;
  cases.push_back(test);

  test = mixed_case("alibi", 8, 2, 64);
  test.spec.scores.has_alibi = true;
  cases.push_back(test);
  test.name = "alibi_tree";
  test.spec.mask = MaskKind::tree;
  test.mode = ForwardMode::target_verify;
  test.requests = {{6, 70}, {6, 6}};
  cases.push_back(test);
  test.name = "everything";
  test.spec.window = 50;
  test.spec.scores.logit_cap = 8;
  test.spec.scores.has_sinks = true;
  cases.push_back(test);
}

void scopes(Cases& cases) {
  const auto ragged = [&](std::string name, auto&& change) {
    AttentionCase test = mha_case("ragged" + name, 4, 2, 64);
    test.spec.scope = AttentionScope::ragged;
    test.mode = ForwardMode::extend;
    test.requests = {{0, 0}, {1, 1}, {17, 17}, {64, 64}, {129, 129}};
    change(test);
    cases.push_back(test);
  };
  ragged("", [](AttentionCase&) {});
  ragged("_strided_window_sinks", [](AttentionCase& test) {
    test.spec.window = 20;
    test.spec.scores.has_sinks = true;
    test.strided = true;
  });
  ragged("_chunk_cap_alibi", [](AttentionCase& test) {
    test.spec.chunk = 16;
    test.spec.scores.logit_cap = 5;
    test.spec.scores.has_alibi = true;
  });
  ragged("_custom", [](AttentionCase& test) { test.spec.mask = MaskKind::custom; });
  ragged("_decode", [](AttentionCase& test) {
    test.mode = ForwardMode::decode;
    test.requests = {{1, 1}, {0, 0}, {1, 1}};
  });

  AttentionCase test = mha_case("encoder", 4, 2, 64);
  test.spec.scope = AttentionScope::encoder;
  test.mode = ForwardMode::extend;
  test.requests = {{0, 0}, {1, 1}, {17, 17}, {64, 64}, {129, 129}};
  cases.push_back(test);
  test.name = "encoder_bf16_strided";
  test.spec.q_dtype = DType::bf16;
  test.strided = true;
  cases.push_back(test);
  // The heads of vision towers.
  test.strided = false;
  for (const int32_t dim : {72, 88}) {
    test.name = fmt::format("encoder_dim_{}", dim);
    test.spec.head_dim = test.spec.head_dim_v = dim;
    cases.push_back(test);
  }

  test = mha_case("encoder_cache", 4, 2, 64);
  test.spec.scope = AttentionScope::encoder_cache;
  test.mode = ForwardMode::extend;
  test.requests = {{0, 0}, {1, 1}, {33, 33}, {70, 70}};
  cases.push_back(test);

  test = mha_case("cross", 4, 2, 64);
  test.spec.scope = AttentionScope::cross;
  test.requests = {{1, 100}, {7, 3}, {1, 0}, {0, 40}, {20, 65}};
  cases.push_back(test);
}

// Appends unusual shapes.
void random_shapes(Cases& cases) {
  for (int round = 1; round < test_scale(); ++round) {
    const auto seed = static_cast<uint32_t>(round);
    for (const AttentionCase& listed : Cases(cases)) {
      if (listed.seed != 1 || listed.page_stride != 0) continue;
      AttentionCase test = listed;
      test.name = fmt::format("{}_seed_{}", listed.name, seed + 1);
      test.seed = seed + 1;
      for (RequestShape& request : test.requests) {
        const bool equal = request.q_len == request.kv_len;
        if (test.mode == ForwardMode::target_verify || request.kv_len < 2) continue;
        if (test.shared_prefix > 0 || test.group_prefix > 0 ||
            test.spec.scope == AttentionScope::cross)
          continue;
        request.kv_len += static_cast<int32_t>((seed * 7 + request.kv_len) % 29);
        if (equal) request.q_len = request.kv_len;
      }
      cases.push_back(test);
    }
  }
}

}  // namespace

const char* scale_name(KvScale scale) {
  constexpr const char* kNames[] = {"none", "per_tensor", "per_head", "per_token_head"};
  return kNames[static_cast<size_t>(scale)];
}

int test_scale() {
  const char* text = std::getenv("FOVEA_TEST_SCALE");
  return text ? std::max(1, std::atoi(text)) : 1;
}

AttentionCase mha_case(std::string name, int32_t q_heads, int32_t kv_heads, int32_t head_dim) {
  AttentionCase test;
  test.name = std::move(name);
  test.spec.q_heads = q_heads;
  test.spec.kv_heads = kv_heads;
  test.spec.head_dim = test.spec.head_dim_v = head_dim;
  test.spec.needs_lse = true;
  test.cache.page_size = 16;
  test.requests = kSmall;
  test.mode = ForwardMode::mixed;
  fit_test_device(test);
  return test;
}

AttentionCase mixed_case(std::string name, int32_t q_heads, int32_t kv_heads, int32_t head_dim) {
  AttentionCase test = mha_case(std::move(name), q_heads, kv_heads, head_dim);
  test.requests = kMixed;
  return test;
}

AttentionCase mla_case(std::string name, int32_t q_heads) {
  AttentionCase test = mha_case(std::move(name), q_heads, 1, 0);
  test.spec.kind = AttentionKind::mla;
  test.spec.mla = {.kv_lora_rank = 512, .rope_dim = 64};
  test.spec.scores.softmax_scale = 1 / std::sqrt(192.0f);
  test.cache.layout = KvLayout::mla;
  return test;
}

std::vector<AttentionCase> attention_cases() {
  Cases cases;
  lengths_and_pages(cases);
  head_shapes(cases);
  phases(cases);
  masks(cases);
  add_tile_cases(cases);
  scores(cases);
  add_cache_cases(cases);
  add_latent_cases(cases);
  scopes(cases);
  add_dual_chunk_cases(cases);
  if (on_gpu()) {
    add_long_cases(cases);
    add_long_latent_cases(cases);
  }
  random_shapes(cases);
  add_random_cases(kRandomCases * test_scale(), cases);
  for (AttentionCase& test : cases) fit_test_device(test);
  return cases;
}

AttentionCase attention_case(std::string_view name) {
  for (AttentionCase& test : attention_cases()) {
    if (test.name == name) return test;
  }
  throw std::out_of_range(fmt::format("there is no case named {}", name));
}

}  // namespace fovea::test
