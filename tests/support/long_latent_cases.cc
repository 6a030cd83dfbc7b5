// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <string>
#include <utility>

#include "support/cases.h"
#include "support/long_cases.h"

namespace fovea::test {

// Cases of row tiles of 64 and 128, key tiles, and parts of a tile on many SMs.
void add_long_latent_cases(std::vector<AttentionCase>& cases) {
  const auto add = [&](std::string name, int32_t q_heads, std::vector<RequestShape> requests,
                       auto&& change) {
    AttentionCase test = mla_case(fmt::format("mla_long_{}", name), q_heads);
    test.cache.page_size = 64;
    test.requests = std::move(requests);
    change(test);
    cases.push_back(test);
  };
  const auto as_is = [](AttentionCase&) {};
  const std::vector<RequestShape> ragged = {{70, 70}, {1, 3000}, {5, 900}, {0, 0},
                                            {1, 1},   {1, 0},    {33, 400}};
  for (const int32_t heads : {1, 5, 16, 64, 128}) {
    add(fmt::format("heads_{}", heads), heads,
        heads > 16 ? std::vector<RequestShape>{{1, 1500}, {3, 300}, {1, 64}} : ragged, as_is);
  }
  for (const int32_t page_size : {1, 3, 16, 32, 128, 256}) {
    add(fmt::format("page_{}", page_size), 8, ragged,
        [&](AttentionCase& test) { test.cache.page_size = page_size; });
  }
  add("fp16", 8, ragged,
      [](AttentionCase& test) { test.spec.q_dtype = test.cache.dtype = DType::f16; });
  add("strided", 8, ragged, [](AttentionCase& test) { test.strided = test.split_q = true; });
  add("shared_prefix", 8, {{1, 900}, {5, 700}, {1, 650}},
      [](AttentionCase& test) { test.shared_prefix = 640; });
  add("prewritten", 8, ragged, [](AttentionCase& test) { test.prewritten = true; });
  add("skip_some_writes", 8, ragged, [](AttentionCase& test) { test.skip_some_writes = true; });
  std::vector<RequestShape> many;
  for (int32_t i = 0; i < 200; ++i) many.push_back({i % 7 == 6 ? 0 : 1, 1 + i * 37 % 200});
  add("decode_of_many", 2, many, [](AttentionCase& test) { test.mode = ForwardMode::decode; });
  add("tree", 8, {{15, 1500}, {15, 15}, {15, 400}}, [](AttentionCase& test) {
    test.spec.mask = MaskKind::tree;
    test.mode = ForwardMode::target_verify;
  });
  const auto with_weights = [](AttentionCase& test) {
    test.spec.mla.nope_dim = test.spec.mla.v_dim = 128;
    test.spec.scores.softmax_scale = 0;
  };
  add("weights", 4, ragged, with_weights);
  const auto fp8_rows = [](AttentionCase& test) {
    test.cache.layout = KvLayout::mla_fp8_rows;
    test.cache.dtype = DType::f8e4m3;
  };
  add("fp8_rows", 16, ragged, fp8_rows);
  add("fp8_rows_page_3", 5, ragged, [&](AttentionCase& test) {
    fp8_rows(test);
    test.cache.page_size = 3;
  });
  add("fp8_rows_weights", 4, ragged, [&](AttentionCase& test) {
    fp8_rows(test);
    with_weights(test);
  });
  for (const int32_t heads : {5, 16, 64, 128}) {
    add(fmt::format("fp8_rows_fp16_heads_{}", heads), heads,
        heads > 16 ? std::vector<RequestShape>{{1, 1500}, {3, 300}, {1, 64}} : ragged,
        [&](AttentionCase& test) {
          fp8_rows(test);
          test.spec.q_dtype = DType::f16;
        });
  }
  add("fp8_rows_fp16_weights", 4, ragged, [&](AttentionCase& test) {
    fp8_rows(test);
    with_weights(test);
    test.spec.q_dtype = DType::f16;
  });
  add("fp8_per_tensor_weights", 4, ragged, [&](AttentionCase& test) {
    test.cache.dtype = DType::f8e4m3;
    test.cache.scale = KvScale::per_tensor;
    with_weights(test);
  });
  add("weights_strided", 3, {{1, 300}, {40, 200}, {0, 3}}, [&](AttentionCase& test) {
    with_weights(test);
    test.strided = test.split_q = true;
    test.spec.mla.v_dim = 72;
  });
  add("weights_prefill", 4, {{150, 150}, {1, 1}, {129, 300}}, [&](AttentionCase& test) {
    with_weights(test);
    test.mode = ForwardMode::extend;
  });
}

}  // namespace fovea::test
