// SPDX-License-Identifier: Apache-2.0
// The perplexity that smaller caches may cost on the validation texts, and results that never pass.
#include "fovea/verify_model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/reference_text.h"
#include "model/patched_model.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

class ReducedCaches : public ::testing::TestWithParam<const char*> {};

TEST_P(ReducedCaches, KeepThePerplexity) {
  VerifyOptions options;
  options.engine.model_path = model_folder(GetParam());
  options.engine.kv_memory_bytes = size_t{64} << 20;
  options.engine.max_context = 1024;
  options.engine.threads = 2;
  options.backends = {"cpu"};
  options.kv_dtypes = {DType::bf16, DType::f8e4m3};  // with a scale per token and head
  const std::vector<VerifyRow> rows = verify_model(options);
  ASSERT_EQ(rows.size(), 2u);
  for (const VerifyRow& row : rows) {
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

// Heads over two ranks, and their tokens as well.
TEST(RanksOfACheck, PassAsOneRankDoes) {
  VerifyOptions options;
  options.engine.model_path = model_folder("llama");
  options.engine.kv_memory_bytes = size_t{64} << 20;
  options.engine.max_context = 1024;
  options.engine.threads = 2;
  options.kv_dtypes = {DType::f32, DType::f8e4m3};
  options.backends = {"cpu", "flash"};
  options.perplexity = false;
  for (const int32_t contexts : {1, 2}) {
    options.parallel = {.tensor_parallel = 2, .context_parallel = contexts};
    const std::vector<VerifyRow> rows = verify_model(options);
    ASSERT_EQ(rows.size(), 4u);
    for (const VerifyRow& row : rows) {
      SCOPED_TRACE(row.backend + " " + std::string(dtype_name(row.kv_dtype)));
      EXPECT_EQ(row.unsupported.empty(), row.backend == "cpu") << row.unsupported;
      if (row.backend != "cpu") continue;
      EXPECT_TRUE(row.pass);
      EXPECT_EQ(row.greedy_total, 5 * 64);
      EXPECT_GT(row.max_logit_difference, 0) << "the bits of one rank";
    }
  }
  options.parallel = {.tensor_parallel = 3};
  test::expect_invalid("3", [&] { verify_model(options); });
}

// A model that no backend can serve is not a refusal by backends: the message is that of loading.
TEST(CheckModel, SaysWhatALoadSays) {
  struct Case {
    nlohmann::json patch;
    const char* message;
  };
  for (const auto& [patch, message] :
       {Case{{{"architectures", {"RwkvForCausalLM"}}},
             "the architecture is 'RwkvForCausalLM'; known are LlamaForCausalLM"},
        Case{{{"quantization_config", {{"bits", 4}}}}, "quantization_config is set"}}) {
    const PatchedModel model("llama", patch);
    VerifyOptions options;
    options.engine.model_path = model.folder();
    test::expect_error(ErrorCode::unsupported, message, [&] { verify_model(options); });
  }
}

// A folder with the files of a test model and one changed number in its reference. The destructor
// removes it.
class ChangedReference {
 public:
  ChangedReference(const std::string& model, const std::string& tensor, float value) {
    namespace fs = std::filesystem;
    folder_ = fs::temp_directory_path() / ("fovea_check_" + std::to_string(getpid()));
    fs::create_directory(folder_);
    for (const fs::directory_entry& file : fs::directory_iterator(model_folder(model))) {
      const fs::path name = file.path().filename();
      if (name != "reference.safetensors") fs::create_symlink(file.path(), folder_ / name);
    }
    std::ifstream from(fs::path(model_folder(model)) / "reference.safetensors", std::ios::binary);
    std::string bytes(std::istreambuf_iterator<char>(from), {});
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), sizeof(header));
    const auto tensors = nlohmann::json::parse(bytes.substr(sizeof(header), header));
    const uint64_t offset = tensors[tensor]["data_offsets"][0];
    std::memcpy(&bytes[sizeof(header) + header + offset + 3 * sizeof(value)], &value,
                sizeof(value));
    std::ofstream(folder_ / "reference.safetensors", std::ios::binary) << bytes;
  }
  ~ChangedReference() { std::filesystem::remove_all(folder_); }
  ChangedReference(const ChangedReference&) = delete;
  ChangedReference& operator=(const ChangedReference&) = delete;

  std::string folder() const { return folder_.string(); }

 private:
  std::filesystem::path folder_;
};

// It fails even with an fp32 cache's limit, and when logits are not compared.
TEST(CheckModel, ADifferenceThatIsNoNumberNeverPasses) {
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity()}) {
    SCOPED_TRACE(value);
    const ChangedReference model("llama", "prompt_1.last_logits", value);
    VerifyOptions options;
    options.engine.model_path = model.folder();
    options.engine.kv_memory_bytes = size_t{64} << 20;
    options.engine.max_context = 1024;
    options.engine.threads = 2;
    options.perplexity = false;
    options.backends = {"cpu"};
    options.kv_dtypes = {DType::f32, DType::bf16, DType::f8e4m3};
    for (const VerifyRow& row : verify_model(options)) {
      SCOPED_TRACE(dtype_name(row.kv_dtype));
      EXPECT_EQ(row.unsupported, "");
      EXPECT_FALSE(std::isfinite(row.max_logit_difference));
      EXPECT_FALSE(row.pass);
    }
  }
}

}  // namespace
}  // namespace fovea
