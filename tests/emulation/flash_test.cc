// SPDX-License-Identifier: Apache-2.0
// Backend `flash` on the emulated GPU against the oracle, in batches small enough for a CPU. The
// launches alternate between all orders that the driver has.
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/cases.h"
#include "support/expect_close.h"
#include "support/expect_error.h"
#include "support/oracle.h"
#include "support/run_backend.h"

namespace fovea {
namespace {

using test::AttentionCase;
using test::Fill;
using test::Output;

// Cases of one head: row tiles that end within a key tile, requests that end within a box, one
// without tokens; more key tiles than stages.
template <typename Change>
AttentionCase prefill_case(std::string name, int32_t head_dim, Change&& change) {
  AttentionCase test = test::mha_case(std::move(name), 1, 1, head_dim);
  test.mode = ForwardMode::extend;
  test.requests = {{140, 900}, {0, 0}, {70, 70}, {33, 161}};
  change(test);
  return test;
}

void add_plain(std::vector<AttentionCase>& cases) {
  const auto add = [&](const char* name, auto&& change) {
    cases.push_back(prefill_case(name, 128, change));
  };
  // More row tiles than blocks.
  add("boxes", [](AttentionCase& test) {
    test.spec.q_heads = test.spec.kv_heads = 3;
    test.spec.scores.has_sinks = true;
  });
  add("sinks_page_64", [](AttentionCase& test) {
    test.spec.scores.has_sinks = true;
    test.cache.page_size = 64;
  });
  add("growing_scores", [](AttentionCase& test) {
    test.growing_scores = true;
    test.requests = {{70, 900}};
  });
  // Tokens before the first key, in row tiles of their own and together with tokens that see some
  // keys.
  add("early_tokens", [](AttentionCase& test) {
    test.requests = {{140, 100}, {5, 0}, {70, 70}, {200, 1}};
  });
  // Row tiles of 256 tokens: half of their rows do not see the last key tile.
  add("passing", [](AttentionCase& test) {
    test.spec.q_heads = test.spec.kv_heads = 2;
    test.requests = {{1030, 1030}};
  });
  add("few_parts", [](AttentionCase& test) { test.requests = {{50, 3100}, {9, 700}}; });
  // Rows for two row tiles of decode.
  add("few_parts_of_drafts", [](AttentionCase& test) {
    test.requests = {{20, 3100}, {0, 0}, {17, 300}, {1, 70}};
  });
  add("parts", [](AttentionCase& test) { test.requests = {{100, 4400}, {0, 0}}; });
  // The first row sees all but the last key of a key tile.
  add("open_edge", [](AttentionCase& test) {
    test.spec.q_heads = test.spec.kv_heads = 3;
    test.requests = {{70, 196}};
  });
  add("without_keys", [](AttentionCase& test) {
    test.spec.scope = AttentionScope::cross;
    test.requests = {{70, 100}, {33, 0}, {9, 3}};
  });
  // Three requests share a prefix that ends within a key tile. The first one has too many new
  // tokens for the group. The pass has few enough for groups: 32 per request.
  add("cascade", [](AttentionCase& test) {
    test.requests = {{40, 330}, {30, 320}, {32, 313}, {20, 302}, {0, 290}};
    test.shared_prefix = 280;
    test.prefix_levels = 1;
    test.spec.scores.has_sinks = true;
  });
}

// One new token per request: tiles of 8 and 16 rows, parts of several blocks joined through memory
// and in a cluster. Odd numbers of q heads per kv head make the concurrent prefill kernels those of
// the cases above.
void add_decode(std::vector<AttentionCase>& cases) {
  const auto add = [&](const char* name, int32_t q_heads, int32_t kv_heads, auto&& requests) {
    AttentionCase test = test::mha_case(name, q_heads, kv_heads, 128);
    test.mode = ForwardMode::decode;
    test.requests = requests;
    cases.push_back(test);
  };
  using Requests = std::vector<test::RequestShape>;
  add("decode", 14, 2, Requests{{1, 300}, {1, 1}, {0, 0}, {1, 17}, {1, 0}, {1, 161}});
  add("decode_16_rows", 26, 2, Requests{{1, 257}, {1, 64}});
  add("decode_parts", 7, 1, Requests{{1, 900}, {1, 30}, {1, 0}, {1, 350}});
  add("decode_cluster", 7, 1, Requests{{1, 1200}});
  add("decode_many_steps", 14, 2, Requests{{1, 1900}, {1, 1500}});
  add("decode_sinks", 14, 2, Requests{{1, 3}, {1, 90}, {1, 300}});
  cases.back().spec.scores.has_sinks = true;
  add("decode_without_keys", 7, 1, Requests{{1, 40}, {1, 0}, {1, 3}});
  cases.back().spec.scope = AttentionScope::cross;
  add("decode_drafts", 3, 1, Requests{{5, 160}, {5, 68}});
  cases.back().mode = ForwardMode::extend;
  // With given positions, visibility of new keys is tested key by key, in the last key tiles alone.
  AttentionCase moved = test::mha_case("decode_moved", 3, 1, 128);
  moved.mode = ForwardMode::extend;
  moved.moved_tokens = true;
  moved.requests = {{5, 608}, {2, 35}, {4, 4}};
  cases.push_back(moved);
}

// Pages that boxes do not fit, and fp8.
void add_cache_formats(std::vector<AttentionCase>& cases) {
  const auto add = [&](const char* name, int32_t head_dim, auto&& change) {
    cases.push_back(prefill_case(name, head_dim, change));
  };
  add("rows", 128, [](AttentionCase& test) { test.cache.page_size = 3; });
  add("tokens", 128, [](AttentionCase& test) { test.cache.page_size = 1; });
  add("rows_parts", 128, [](AttentionCase& test) {
    test.cache.page_size = 3;
    test.requests = {{100, 4400}, {0, 0}};
  });
  add("rows_few_parts", 128, [](AttentionCase& test) {
    test.cache.page_size = 3;
    test.requests = {{50, 3100}, {9, 700}};
  });
  for (const KvScale scale : {KvScale::none, KvScale::per_token_head}) {
    const std::string name = std::string("fp8_boxes_") + test::scale_name(scale);
    add(name.c_str(), 128, [&](AttentionCase& test) {
      test.cache.dtype = DType::f8e4m3;
      test.cache.scale = scale;
    });
  }
  add("fp8_boxes_page_48", 128, [](AttentionCase& test) {
    test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_token_head;
    test.cache.page_size = 48;
  });
  add("fp8_dim_256", 256, [](AttentionCase& test) {
    test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_token_head;
    test.requests = {{70, 300}, {0, 0}, {33, 61}};
  });
  add("fp8_boxes_parts", 128, [](AttentionCase& test) {
    test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_token_head;
    test.requests = {{100, 4400}, {0, 0}};
  });
  const auto add_products = [&](const char* name, auto&& change) {
    add(name, 128, [&](AttentionCase& test) {
      test.spec.q_dtype = test.cache.dtype = DType::f8e4m3;
      test.cache.scale = KvScale::per_tensor;
      change(test);
    });
  };
  add_products("fp8_products", [](AttentionCase&) {});
  add_products("fp8_products_growing", [](AttentionCase& test) {
    test.growing_scores = true;
    test.requests = {{70, 900}};
  });
  add_products("fp8_products_invariant",
               [](AttentionCase& test) { test.spec.batch_invariant = true; });
}

void add_dims_and_masks(std::vector<AttentionCase>& cases) {
  const auto add = [&](const char* name, int32_t head_dim, auto&& change) {
    cases.push_back(prefill_case(name, head_dim, change));
  };
  add("dim_64", 64, [](AttentionCase&) {});
  add("dim_192_128", 192, [](AttentionCase& test) { test.spec.head_dim_v = 128; });
  // Row tiles of 256 tokens in pairs whose consumers do not see their last key tiles.
  for (const int32_t head_dim_v : {128, 256}) {
    const std::string name = "own_heads_" + std::to_string(head_dim_v);
    add(name.c_str(), head_dim_v == 128 ? 192 : 256, [&](AttentionCase& test) {
      test.spec.head_dim_v = head_dim_v;
      test.spec.q_heads = test.spec.kv_heads = 2;
      test.requests = {{1030, 1040}, {130, 400}, {60, 61}};
    });
  }
  add("custom", 128, [](AttentionCase& test) { test.spec.mask = MaskKind::custom; });
  add("tree", 128, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.requests = {{40, 700}, {64, 470}, {40, 40}};
  });
  // The pages of a window pool contain NaN from before the window; few rows, for decode, and many.
  add("decode_window_pool_tree", 128, [](AttentionCase& test) {
    test.spec.q_heads = 3;
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.spec.window = 90;
    test.window_pool = true;
    test.requests = {{5, 608}, {5, 68}, {5, 5}, {1, 300}};
  });
  add("window_pool_tree", 128, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
    test.spec.window = 200;
    test.window_pool = true;
    test.requests = {{40, 700}, {64, 470}, {40, 40}};
  });
  // For decode: one and two of its row tiles, new keys at the end of a key tile and on both sides
  // of it.
  for (const int32_t drafts : {2, 4, 7}) {
    const std::string name = "tree_of_" + std::to_string(drafts);
    add(name.c_str(), 128, [&](AttentionCase& test) {
      test.spec.q_heads = 4;
      test.spec.mask = MaskKind::tree;
      test.mode = ForwardMode::target_verify;
      test.requests = {
          {drafts, 608}, {drafts, 336 + drafts / 2}, {0, 0}, {1, 70}, {drafts, drafts}};
    });
  }
}

// Segments of 1024 keys, divided among blocks; few rows; eight rows, by one block and by pairs of
// blocks.
void add_segments(std::vector<AttentionCase>& cases) {
  const auto add = [&](const char* name, auto&& change) {
    cases.push_back(prefill_case(name, 128, change));
  };
  add("segments", [](AttentionCase& test) {
    test.spec.batch_invariant = true;
    test.requests = {{140, 2300}, {0, 0}, {70, 70}};
  });
  for (const int32_t rows : {40, 8}) {
    const std::string name = "segments_rows_" + std::to_string(rows);
    add(name.c_str(), [&](AttentionCase& test) {
      test.spec.batch_invariant = true;
      test.requests = {{rows, 2300}, {5, 70}};
    });
  }
  // Four blocks compute one segment: of a single request, in a cluster, or by pairs.
  for (const int32_t keys : {900, 1900, 2300, 2900, 3900}) {
    const std::string name = "segments_of_one_" + std::to_string(keys);
    add(name.c_str(), [&](AttentionCase& test) {
      test.spec.batch_invariant = true;
      test.requests = {{7, keys}};
    });
  }
  add("segments_of_one_heads", [](AttentionCase& test) {
    test.spec.batch_invariant = true;
    test.spec.q_heads = 8;
    test.requests = {{1, 2700}};
  });
  add("segments_of_one_growing", [](AttentionCase& test) {
    test.spec.batch_invariant = true;
    test.growing_scores = true;
    test.requests = {{8, 2000}};
  });
  add("segments_of_two", [](AttentionCase& test) {
    test.spec.batch_invariant = true;
    test.requests = {{8, 1000}, {2, 300}};
  });
}

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> cases;
  add_plain(cases);
  add_decode(cases);
  if (!FOVEA_EMULATE_MORE) return cases;
  add_cache_formats(cases);
  add_dims_and_masks(cases);
  add_segments(cases);
  return cases;
}

class Flash : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(Flash, MatchesTheOracle) {
  const AttentionCase& test = GetParam();
  const test::CaseData data = make_data(test);
  const BackendRegistry registry = BackendRegistry::builtin();
  const size_t count = test.mode == ForwardMode::decode ? 4 : 1;  // prefill takes long
  const std::vector<Output> passes =
      run_batches(*registry.find("flash"), test, data, std::vector(count, test::whole_case(test)),
                  {.fill = Fill::poison});
  for (const Output& again : passes) EXPECT_TRUE(same_bits(passes.front(), again));
  const Output& got = passes.front();
  const auto heads = static_cast<size_t>(test.spec.q_heads);
  const auto width = static_cast<size_t>(test::out_width(test.spec));
  size_t row = 0;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    const size_t rows = static_cast<size_t>(test.requests[request].q_len) * heads;
    const std::span<const float> out(got.out.data() + row * width, rows * width);
    const std::span<const float> lse(got.lse.data() + row, rows);
    EXPECT_TRUE(is_close(test.spec, oracle(test, data, request), out, lse))
        << "request " << request;
    row += rows;
  }
}

// The contract tests require this of every backend.
TEST(FlashPlan, AFailedPlanLeavesNoPlan) {
  const AttentionCase test = test::mha_case("plan", 7, 1, 128);
  const test::CaseData data = make_data(test);
  const BackendRegistry registry = BackendRegistry::builtin();
  ThreadPool threads(1);
  test::PagedStore store(test, data, Fill::zero);
  test::BackendUnderTest under_test(*registry.find("flash"), test, &store, threads);
  test::PackedBatch batch(test, data, &store, whole_case(test), Fill::poison);
  under_test.run(batch);
  BatchView wrong = batch.view();
  wrong.requests = limits_of(test).max_requests + 1;
  test::expect_invalid("requests is", [&] { under_test.backend().plan(wrong); });
  EXPECT_EQ(test::error_of([&] { under_test.backend().forward(batch.tensors()); }),
            "forward() without a plan");
}

INSTANTIATE_TEST_SUITE_P(All, Flash, ::testing::ValuesIn(cases()),
                         [](const auto& given) { return given.param.name; });

}  // namespace
}  // namespace fovea
