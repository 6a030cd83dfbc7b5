// SPDX-License-Identifier: Apache-2.0
// A config without weights is a model: every architecture runs with random weights, with finite
// logits and the same bits for the same seed.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/small_engine.h"
#include "support/expect_error.h"
#include "support/golden_model.h"

namespace fovea {
namespace {

const std::vector<int32_t> kTokens = {0, 5, 7, 9, 100, 200, 300, 400, 500, 600};

EngineOptions random_options(const std::string& path, uint64_t seed) {
  EngineOptions options = small_options();
  options.model_path = path;
  options.random_weights = seed;
  options.kv_memory_bytes = size_t{64} << 20;  // for 80 layers too
  return options;
}

std::vector<float> random_logits(const std::string& path, uint64_t seed) {
  return Engine::load(random_options(path, seed))->logits(kTokens);
}

// Returns the root mean square, which must be finite.
double spread(const std::vector<float>& logits) {
  double squares = 0;
  for (const float logit : logits) squares += double{logit} * logit;
  return std::sqrt(squares / static_cast<double>(logits.size()));
}

// A folder with only a config.json. The destructor removes it.
class ConfigFolder {
 public:
  ConfigFolder(const std::string& model, const nlohmann::json& patch)
      : path_(std::filesystem::temp_directory_path() /
              ("fovea_config_" + std::to_string(getpid()))) {
    std::filesystem::create_directory(path_);
    std::ifstream file(model_folder(model) + "/config.json");
    nlohmann::json config = nlohmann::json::parse(file);
    config.merge_patch(patch);
    std::ofstream(path_ / "config.json") << config;
  }
  ~ConfigFolder() { std::filesystem::remove_all(path_); }
  ConfigFolder(const ConfigFolder&) = delete;
  ConfigFolder& operator=(const ConfigFolder&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TEST(RandomWeights, EveryArchitectureRuns) {
  for (const std::string model : kTestModels) {
    SCOPED_TRACE(model);
    const std::string config = model_folder(model) + "/config.json";
    const std::vector<float> logits = random_logits(config, 3);
    const double size = spread(logits);
    EXPECT_GT(size, 0.2);
    EXPECT_LT(size, 5);  // hence finite
    // A folder means its config.
    EXPECT_EQ(logits, random_logits(model_folder(model), 3));
    EXPECT_NE(logits, random_logits(config, 4));
  }
}

TEST(RandomWeights, TheTinyConfigsOfOtherArchitecturesRun) {
  std::vector<int32_t> tokens = kTokens;
  for (int32_t& token : tokens) token %= 64;
  const auto logits_of = [&](const std::string& config, uint64_t seed) {
    EngineOptions options = random_options(config, seed);
    options.max_context = 16;  // Phi-3's default is its original length of 4
    return Engine::load(options)->logits(tokens);
  };
  for (const std::string& model : golden_models()) {
    SCOPED_TRACE(model);
    const std::string config = (golden_source(model) / "config.json").string();
    const std::vector<float> logits = logits_of(config, 3);
    const double size = spread(logits);
    EXPECT_GT(size, 1e-3);
    EXPECT_LT(size, 1e3);  // hence finite
    EXPECT_EQ(logits, logits_of(config, 3));
    EXPECT_NE(logits, logits_of(config, 4));
  }
}

TEST(RandomWeights, EightyLayersStayInRange) {
  for (const char* model : {"llama", "gemma2"}) {
    SCOPED_TRACE(model);
    const ConfigFolder deep(model, {{"num_hidden_layers", 80}, {"layer_types", nullptr}});
    const double size = spread(random_logits(deep.path(), 1));
    EXPECT_GT(size, 0.2);
    EXPECT_LT(size, 5);
  }
}

TEST(RandomWeights, TokenIdsRunWithoutATokenizer) {
  const ConfigFolder folder("qwen3", {{"quantization_config", {{"quant_method", "fp8"}}}});
  const std::unique_ptr<Engine> engine = Engine::load(random_options(folder.path(), 5));
  GenerateRequest request;
  request.tokens = kTokens;
  request.sampling.max_new_tokens = 6;
  request.sampling.ignore_eos = true;
  const std::vector<GenerateResult> results = engine->generate({&request, 1});
  ASSERT_EQ(results.size(), 1u);
  EXPECT_EQ(results[0].tokens.size(), 6u);
  EXPECT_EQ(results[0].text, "");
  EXPECT_EQ(engine->decode(kTokens), "");
  // Generated weights are allocated: about 2 bytes per parameter.
  EXPECT_GT(engine->stats().memory.weights, size_t{500'000});
}

TEST(RandomWeights, AreSuggestedWhereWeightsAreMissing) {
  const ConfigFolder folder("llama", nlohmann::json::object());
  EngineOptions options = random_options(folder.path(), 1);
  options.random_weights.reset();
  test::expect_error(ErrorCode::io, {"neither model.safetensors", "--random-weights SEED"},
                     [&] { Engine::load(options); });
  options.model_path = folder.path() + "/config.json";
  test::expect_error(ErrorCode::invalid_argument,
                     {"config.json is a file", "--random-weights SEED"},
                     [&] { Engine::load(options); });
  options.random_weights = 1;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  test::expect_error(ErrorCode::unsupported, "no tokenizer",
                     [&] { engine->add(text_request("In", 1)); });
}

}  // namespace
}  // namespace fovea
