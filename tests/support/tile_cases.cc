// SPDX-License-Identifier: Apache-2.0
#include "support/tile_cases.h"

#include <fmt/core.h>

#include <string>

#include "support/cases.h"

namespace fovea::test {

void add_tile_cases(std::vector<AttentionCase>& cases) {
  const auto add = [&](std::string name, int32_t dim, auto&& change) {
    AttentionCase test = mha_case(fmt::format("tiles_{}_{}", name, dim), 8, 2, dim);
    test.mode = ForwardMode::extend;
    test.requests = {{150, 700}, {290, 290}, {3, 500}};
    test.growing_scores = dim == 128;  // also in masked tiles
    change(test);
    cases.push_back(test);
  };
  for (const int32_t dim : {64, 128, 256}) {
    add("custom", dim, [](AttentionCase& test) { test.spec.mask = MaskKind::custom; });
    add("spans", dim, [](AttentionCase& test) { test.spec.mask = MaskKind::prefix_spans; });
    add("items", dim, [](AttentionCase& test) { test.spec.mask = MaskKind::multi_item; });
    add("cap", dim, [](AttentionCase& test) { test.spec.scores.logit_cap = 30; });
    add("cap_far", dim, [](AttentionCase& test) { test.spec.scores.logit_cap = 0.5f; });
    add("alibi_cap", dim, [](AttentionCase& test) {
      test.spec.scores.has_alibi = true;
      test.spec.scores.logit_cap = 80;
    });
    add("alibi_window", dim, [](AttentionCase& test) {
      test.spec.scores.has_alibi = true;
      test.spec.window = 200;
    });
    add("moved_window", dim, [](AttentionCase& test) {
      test.moved_tokens = true;
      test.spec.window = 180;
    });
    add("tree_window", dim, [](AttentionCase& test) {
      test.spec.mask = MaskKind::tree;
      test.spec.window = 180;
      test.mode = ForwardMode::target_verify;
      test.requests = {{40, 700}, {40, 40}, {40, 333}};
    });
  }
  add("moved_chunk", 128, [](AttentionCase& test) {
    test.moved_tokens = true;
    test.spec.chunk = 200;
  });
  add("moved_spans", 128, [](AttentionCase& test) {
    test.moved_tokens = true;
    test.spec.mask = MaskKind::prefix_spans;
  });
  add("moved_items_window", 128, [](AttentionCase& test) {
    test.moved_tokens = true;
    test.spec.mask = MaskKind::multi_item;
    test.spec.window = 300;
  });
  // Drafts fill decode's row tiles: only the last key tiles of a request have hidden keys.
  for (const int32_t drafts : {2, 4, 7}) {
    const auto add_tree = [&](const std::string& name, auto&& change) {
      add(fmt::format("tree_of_{}_{}", drafts, name), 128, [&](AttentionCase& test) {
        test.spec.mask = MaskKind::tree;
        test.mode = ForwardMode::target_verify;
        test.growing_scores = false;  // otherwise the last keys have nearly all weight
        test.requests = {
            {drafts, 6000}, {drafts, 1600 + drafts / 2}, {drafts, 350}, {drafts, drafts}};
        change(test);
      });
    };
    for (const int32_t page_size : {1, 64}) {
      add_tree(fmt::format("page_{}", page_size),
               [&](AttentionCase& test) { test.cache.page_size = page_size; });
    }
    add_tree("fp8", [](AttentionCase& test) {
      test.cache.dtype = DType::f8e4m3;
      test.cache.scale = KvScale::per_token_head;
    });
    add_tree("alike", [&](AttentionCase& test) { test.requests.assign(7, {drafts, 530}); });
  }
  add("tree_of_4_window", 128, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.spec.window = 500;
    test.mode = ForwardMode::target_verify;
    test.requests = {{4, 2000}, {4, 502}, {4, 350}};
  });
  // Products of thousands of caps.
  add("cap_steep", 128, [](AttentionCase& test) {
    test.spec.scores.logit_cap = 0.002f;
    test.spec.scores.softmax_scale = 8;
  });
}

}  // namespace fovea::test
