// SPDX-License-Identifier: Apache-2.0
// What caches of fewer bits may cost: perplexity of the validation texts.
#include "fovea/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/reference_text.h"
#include "model/patched_model.h"
#include "support/expect_error.h"

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

// A model that no backend can serve is no refusal of backends: the message is that of a load.
TEST(CheckModel, SaysWhatALoadSays) {
  struct Case {
    nlohmann::json patch;
    const char* message;
  };
  for (const auto& [patch, message] :
       {Case{{{"architectures", {"MambaForCausalLM"}}},
             "the architecture is 'MambaForCausalLM'; known are LlamaForCausalLM"},
        Case{{{"quantization_config", {{"bits", 4}}}}, "quantization_config is set"}}) {
    const PatchedModel model("llama", patch);
    CheckOptions options;
    options.engine.model_path = model.folder();
    test::expect_error(ErrorCode::unsupported, message, [&] { check_model(options); });
  }
}

}  // namespace
}  // namespace fovea
