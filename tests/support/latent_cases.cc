// SPDX-License-Identifier: Apache-2.0
#include "support/latent_cases.h"

#include <fmt/core.h>

#include "support/cases.h"

namespace fovea::test {
namespace {

using Cases = std::vector<AttentionCase>;

void rows(Cases& cases) {
  for (int32_t page_size : {1, 16, 64, 128}) {
    AttentionCase test = mla_case(fmt::format("mla_page_{}", page_size), 4);
    test.cache.page_size = page_size;
    test.split_q = page_size == 16;
    cases.push_back(test);
  }
  AttentionCase test = mla_case("mla_128_heads", 128);
  test.requests = {{1, 97}, {2, 17}};
  cases.push_back(test);
  test = mla_case("mla_bf16", 16);
  test.spec.q_dtype = DType::bf16;
  test.cache.dtype = DType::bf16;
  cases.push_back(test);
  test.name = "mla_fp8_rows";
  test.cache.layout = KvLayout::mla_fp8_rows;
  test.cache.dtype = DType::f8e4m3;
  cases.push_back(test);
  test.name = "mla_fp8_rows_fp16";
  test.spec.q_dtype = DType::f16;
  cases.push_back(test);
  test.spec.q_dtype = DType::bf16;
  test.name = "mla_fp8_per_token";
  test.cache.layout = KvLayout::mla;
  test.cache.scale = KvScale::per_token_head;
  cases.push_back(test);
  test.name = "mla_fp8_per_tensor";
  test.cache.scale = KvScale::per_tensor;
  cases.push_back(test);

  test = mla_case("mla_verify", 8);
  test.mode = ForwardMode::target_verify;
  test.requests = {{5, 60}, {5, 5}};
  cases.push_back(test);
  test.name = "mla_tree";
  test.spec.mask = MaskKind::tree;
  cases.push_back(test);

  test.name = "mla_tree_window";
  test.spec.window = 3;
  cases.push_back(test);
  test = mixed_case("", 2, 1, 64);
  const std::vector<RequestShape> mixed = test.requests;
  test = mla_case("mla_window", 8);
  test.requests = mixed;
  test.spec.window = 20;
  cases.push_back(test);

  test = mla_case("mla_256_64", 8);
  test.spec.mla.kv_lora_rank = 256;
  cases.push_back(test);
  test = mla_case("mla_512_0", 8);
  test.spec.mla.rope_dim = 0;
  cases.push_back(test);

  test = mla_case("mla_weights", 4);
  test.spec.mla.nope_dim = 128;
  test.spec.mla.v_dim = 128;
  test.spec.scores.softmax_scale = 0;
  test.requests = {{1, 70}, {9, 30}, {17, 17}, {1, 1}, {0, 0}};
  cases.push_back(test);
  test.name = "mla_weights_split_decode";
  test.mode = ForwardMode::decode;
  test.split_q = true;
  test.requests = {{1, 70}, {1, 30}};
  cases.push_back(test);
}

// Cases of rotation: kind mla rotates the rotary key and the rotary part of q.
void rotations(Cases& cases) {
  AttentionCase base = mla_case("", 4);
  base.spec.has_rope = true;
  base.mode = ForwardMode::mixed;
  base.requests = {{1, 130}, {9, 30}, {0, 0}, {1, 1}, {17, 17}};
  const auto add = [&](const char* name, auto&& change) {
    AttentionCase test = base;
    test.name = name;
    change(test);
    cases.push_back(test);
  };
  const auto as_is = [](AttentionCase&) {};
  add("mla_rope", as_is);
  add("mla_rope_prewritten", [](AttentionCase& test) { test.prewritten = true; });
  add("mla_rope_skip_some_writes", [](AttentionCase& test) { test.skip_some_writes = true; });
  add("mla_rope_tree", [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.requests = {{8, 120}, {8, 8}};
  });
  base.spec.q_dtype = base.cache.dtype = DType::bf16;
  base.rope_interleaved = true;
  add("mla_rope_part_strided", [](AttentionCase& test) {
    test.rotary_dim = 20;
    test.strided = test.split_q = true;
    test.cache.page_size = 16;
  });
  add("mla_rope_weights", [](AttentionCase& test) {
    test.spec.mla.nope_dim = test.spec.mla.v_dim = 128;
    test.spec.scores.softmax_scale = 0;
  });
  base.cache.dtype = DType::f8e4m3;
  add("mla_rope_fp8_per_token",
      [](AttentionCase& test) { test.cache.scale = KvScale::per_token_head; });
  add("mla_rope_fp8_per_tensor",
      [](AttentionCase& test) { test.cache.scale = KvScale::per_tensor; });
  base.cache.layout = KvLayout::mla_fp8_rows;
  add("mla_rope_fp8_rows", as_is);
  add("mla_rope_fp8_rows_split_prewritten",
      [](AttentionCase& test) { test.split_q = test.prewritten = true; });
  add("mla_rope_fp8_rows_fp16", [](AttentionCase& test) {
    test.spec.q_dtype = DType::f16;
    test.rotary_dim = 32;
    test.rope_interleaved = false;
  });
}

}  // namespace

void add_latent_cases(Cases& cases) {
  rows(cases);
  rotations(cases);
}

}  // namespace fovea::test
