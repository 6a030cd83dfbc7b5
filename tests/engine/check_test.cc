// SPDX-License-Identifier: Apache-2.0
// What caches of fewer bits may cost: perplexity of the validation texts.
#include "fovea/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/reference_text.h"

namespace fovea {
namespace {

class ReducedCaches : public ::testing::TestWithParam<const char*> {};

TEST_P(ReducedCaches, KeepThePerplexity) {
  CheckOptions options;
  options.engine.model_path = model_folder(GetParam());
  options.engine.kv_memory_bytes = size_t{64} << 20;
  options.engine.max_context = 1024;
  options.engine.threads = 2;
  options.backends = {"cpu"};
  options.kv_dtypes = {DType::bf16, DType::f8e4m3};  // the latter with a scale a token and head
  const std::vector<CheckRow> rows = check_model(options);
  ASSERT_EQ(rows.size(), 2u);
  for (const CheckRow& row : rows) {
    SCOPED_TRACE(dtype_name(row.kv_dtype));
    EXPECT_EQ(row.unsupported, "");
    EXPECT_GT(row.perplexity, 10);
    EXPECT_LE(std::fabs(row.perplexity_change), row.kv_dtype == DType::bf16 ? 0.01 : 0.03);
    EXPECT_GT(row.max_logit_difference, 1e-4) << "stored in fp32";
    EXPECT_EQ(row.greedy_total, 5 * 64);
    EXPECT_TRUE(row.pass);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ReducedCaches, ::testing::ValuesIn(kTestModels),
                         [](const auto& model) { return std::string(model.param); });

}  // namespace
}  // namespace fovea
