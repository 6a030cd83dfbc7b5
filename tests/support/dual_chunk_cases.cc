// SPDX-License-Identifier: Apache-2.0
#include "support/dual_chunk_cases.h"

#include <fmt/core.h>

#include <string>

#include "support/cases.h"

namespace fovea::test {

// Borders of chunks at, before and after those of pages and key tiles; decodes in every chunk up to
// the fifth, extends across borders, requests shorter than a chunk.
void add_dual_chunk_cases(std::vector<AttentionCase>& cases) {
  const auto add = [&](std::string name, int32_t chunk_size, int32_t local_size, auto&& change) {
    AttentionCase test = mixed_case("dual_chunk" + name, 4, 2, 64);
    test.spec.dual_chunk = {chunk_size, local_size};
    test.requests.insert(test.requests.end(), {{1, 64}, {1, 65}, {70, 200}, {1, 320}});
    change(test);
    cases.push_back(test);
  };
  add("", 80, 16, [](AttentionCase&) {});
  for (const int32_t length : {1, 15, 16, 17, 63, 65, 1000}) {
    add(fmt::format("_{}", length), length + 3, 3, [](AttentionCase&) {});
  }
  add("_decode", 80, 16, [](AttentionCase& test) {
    test.mode = ForwardMode::decode;
    test.requests.clear();
    for (const int32_t length : {1, 63, 64, 65, 127, 128, 129, 192, 193, 320, 0}) {
      test.requests.push_back({1, length});
    }
  });
  add("_rope", 80, 16, [](AttentionCase& test) {
    test.spec.has_rope = true;
    test.spec.q_heads = 14;
    test.strided = true;
  });
  // Local sizes of 0, and larger than a chunk.
  for (const int32_t local_size : {0, 50}) {
    add(fmt::format("_rope_local_{}", local_size), 64, local_size, [](AttentionCase& test) {
      test.spec.has_rope = test.rope_interleaved = true;
      test.rotary_dim = 32;
    });
  }
  add("_bf16_fp8_page_1", 40, 8, [](AttentionCase& test) {
    test.spec.q_dtype = DType::bf16;
    test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_token_head;
    test.cache.page_size = 1;
  });
  add("_q_fp8", 40, 8, [](AttentionCase& test) {  // one q_scale for the three queries
    test.spec.q_dtype = test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_head;
  });
  add("_sinks_cap_window", 40, 8, [](AttentionCase& test) {
    test.spec.scores.has_sinks = true;
    test.spec.scores.logit_cap = 5;
    test.spec.window = 90;
  });
  add("_moved", 40, 8, [](AttentionCase& test) { test.moved_tokens = true; });
  add("_tree", 24, 4, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.requests = {{8, 120}, {8, 8}, {8, 24}, {8, 65}};
  });
  add("_shared_prefix", 40, 8, [](AttentionCase& test) {
    test.shared_prefix = 64;
    test.prefix_levels = 2;
    test.requests = {{1, 100}, {1, 130}, {5, 90}};
  });
  add("_ragged", 40, 8, [](AttentionCase& test) {
    test.spec.scope = AttentionScope::ragged;
    test.mode = ForwardMode::extend;
    test.requests = {{0, 0}, {1, 1}, {33, 33}, {64, 64}, {129, 129}};
  });
}

}  // namespace fovea::test
