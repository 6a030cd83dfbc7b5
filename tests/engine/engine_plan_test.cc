// SPDX-License-Identifier: Apache-2.0
// Engine::plan reports, without reading weights, what Engine::load chooses and allocates.
#include <gtest/gtest.h>
#include <malloc.h>

#include <filesystem>
#include <string>
#include <vector>

#include "engine/small_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;  // the sanitizer replaces the heap
#else
constexpr bool kSanitized = false;
#endif

EngineOptions shape_options(const std::string& shape) {
  EngineOptions options;
  options.model_path = std::string(FOVEA_SOURCE_DIR) + "/testdata/shapes/" + shape + ".json";
  options.random_weights = 1;
  options.kv_memory_bytes = size_t{80} << 30;
  options.kv_dtype = DType::bf16;
  options.threads = 1;
  return options;
}

const DeviceInfo kH200 = {.kind = DeviceKind::cuda, .name = "sm_90", .sm = 90, .cores = 132};

// Returns whether this machine has Hopper kernels, or a compiler for them.
bool has_hopper_kernels() {
  try {
    (void)Engine::plan(shape_options("qwen3_0.6b"), kH200);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void expect_same(const EngineMemory& got, const EngineMemory& want) {
  EXPECT_EQ(got.weights, want.weights);
  EXPECT_EQ(got.caches, want.caches);
  EXPECT_EQ(got.activations, want.activations);
  EXPECT_EQ(got.positions, want.positions);
  EXPECT_EQ(got.attention, want.attention);
  EXPECT_EQ(got.logits, want.logits);
  EXPECT_EQ(got.products, want.products);
  EXPECT_EQ(got.batch, want.batch);
}

TEST(EnginePlan, IsWhatLoadAllocates) {
  for (const std::string model : kTestModels) {
    for (const bool random : {false, true}) {
      SCOPED_TRACE(model + (random ? ", random weights" : ""));
      EngineOptions options = small_options(model);
      if (random) options.random_weights = 1;
      options.threads = 2;
      const EnginePlan plan = Engine::plan(options);
      const std::unique_ptr<Engine> engine = Engine::load(options);
      expect_same(plan.memory, engine->stats().memory);
      EXPECT_EQ(plan.max_context, engine->max_context());
      EXPECT_EQ(plan.wanted_context, engine->wanted_context());
      ASSERT_EQ(plan.selections.size(), engine->selections().size());
      for (size_t g = 0; g < plan.selections.size(); ++g) {
        EXPECT_EQ(plan.selections[g].prefill.explain(), engine->selections()[g].prefill.explain());
      }
      EXPECT_EQ(plan.explain(), engine->explain());
    }
  }
}

// The heap grows by the sum of the parts, except for small allocations.
TEST(EnginePlan, PartsSumToWhatIsAllocated) {
  if (kSanitized) GTEST_SKIP() << "the heap is the sanitizer's";
  const auto heap = [] {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<double>(info.uordblks + info.hblkhd);
  };
  for (const std::string model : {"llama", "gpt_oss", "deepseek_v3", "qwen3_next"}) {
    SCOPED_TRACE(model);
    EngineOptions options = small_options(model);
    options.model_path += "/config.json";
    options.random_weights = 1;
    options.max_batch_tokens = 4096;
    options.max_context = 4096;
    options.max_requests = 16;
    options.kv_memory_bytes = size_t{512} << 20;
    (void)Engine::load(options);  // allocations that happen once per process
    const double before = heap();
    const std::unique_ptr<Engine> engine = Engine::load(options);
    const EngineMemory& memory = engine->stats().memory;
    // Pools are mapped, not on the heap. Their lists of pages and slots are not counted.
    const auto parts = static_cast<double>(memory.total() - memory.caches);
    EXPECT_NEAR(heap() - before, parts, 0.01 * parts + 3e6);
  }
}

// The published parameter count of each model, two bytes each; vectors are larger.
TEST(EnginePlan, ShapesHaveTheirPublishedSizes) {
  const std::pair<const char*, double> shapes[] = {
      {"llama3_1b", 1'235'814'400},         {"llama3_8b", 8'030'261'248},
      {"qwen3_0.6b", 596'049'920},          {"qwen3_8b", 8'190'735'360},
      {"qwen3_32b", 32'762'123'264},        {"gemma2_2b", 2'614'341'888},
      {"gemma2_9b", 9'241'705'984},         {"gpt_oss_20b", 20'914'757'184},
      {"mistral_7b", 7'248'023'552},        {"qwen3_30b_a3b", 30'532'122'624},
      {"deepseek_v2_lite", 15'706'484'224}, {"lfm2_1.2b", 1'170'340'608},
  };
  for (const auto& [shape, parameters] : shapes) {
    SCOPED_TRACE(shape);
    const EnginePlan plan = Engine::plan(shape_options(shape));
    EXPECT_GE(static_cast<double>(plan.memory.weights), 2 * parameters);
    EXPECT_LE(static_cast<double>(plan.memory.weights), 2.01 * parameters);
  }
}

// Every shape is served on a GPU. A rank of eight has an eighth of the parts that are divided.
TEST(EnginePlan, EveryShapeIsPlannedOnAGpu) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "neither kernels of sm_90 nor NVRTC";
  int shapes = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(FOVEA_SOURCE_DIR) + "/testdata/shapes")) {
    SCOPED_TRACE(entry.path());
    const EngineMemory memory =
        Engine::plan(shape_options(entry.path().stem().string()), kH200).memory;
    EXPECT_GT(memory.weights, size_t{1'000'000'000});
    EXPECT_LT(memory.weights, size_t{180'000'000'000});
    EXPECT_LE(memory.caches, size_t{80} << 30);
    EXPECT_LE(memory.total() - memory.weights - memory.caches, size_t{1'500'000'000})
        << memory.explain();
    ++shapes;
  }
  EXPECT_EQ(shapes, 14);
}

// Layers of all kinds verify trees on a GPU, and passes without trees keep their backends.
TEST(EnginePlan, TreesHaveBackendsOnAGpu) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "neither kernels of sm_90 nor NVRTC";
  for (const char* shape : {"qwen3_8b", "gemma2_2b", "gpt_oss_20b", "deepseek_v2_lite"}) {
    SCOPED_TRACE(shape);
    EngineOptions options = shape_options(shape);
    const EnginePlan plain = Engine::plan(options, kH200);
    options.speculate = "draft:" + options.model_path;
    if (std::string(shape) == "qwen3_8b")
      options.speculate = "eagle:" FOVEA_SOURCE_DIR "/testdata/drafts/qwen3_8b_eagle.json";
    options.max_drafts = 16;
    options.draft_branches = 4;
    const EnginePlan plan = Engine::plan(options, kH200);
    ASSERT_EQ(plan.selections.size(), plain.selections.size());
    for (size_t i = 0; i < plan.selections.size(); ++i) {
      ASSERT_TRUE(plan.selections[i].trees);
      EXPECT_EQ(plan.selections[i].prefill.chosen->name, plain.selections[i].prefill.chosen->name);
    }
    EXPECT_NE(plan.explain().find(", trees of drafts\n"), std::string::npos);
    EXPECT_GT(plan.memory.drafter, 0u);
  }
}

// Only sampled rows have logits, and feed-forward blocks compute long passes in pieces.
TEST(EnginePlan, ALongPassOfAModelOf8BTakesLittleMoreThanWeightsAndCaches) {
  if (!has_hopper_kernels()) GTEST_SKIP() << "neither kernels of sm_90 nor NVRTC";
  EngineOptions options = shape_options("qwen3_8b");
  options.max_batch_tokens = 16384;
  const EngineMemory memory = Engine::plan(options, kH200).memory;
  EXPECT_EQ(memory.positions, size_t{2} * 40960 * 64 * (sizeof(float) + sizeof(uint16_t)));
  EXPECT_LE(memory.total() - memory.weights - memory.caches, size_t{1'500'000'000})
      << memory.explain();
  // f32 twice, bf16 once.
  EXPECT_GE(memory.activations, size_t{16384} * 4096 * 10);
  EXPECT_GT(memory.attention, 0u);
  EXPECT_EQ(memory.products, size_t{32} << 20);
  const size_t row = 151936 * sizeof(float);
  EXPECT_EQ(memory.logits % row, 0u);
  EXPECT_GE(memory.logits, 32 * row);
  EXPECT_LE(memory.logits, size_t{64} << 20);
}

TEST(EnginePlan, ADeviceElsewhereNeedsABudget) {
  EngineOptions options = shape_options("qwen3_0.6b");
  options.kv_memory_bytes = 0;
  test::expect_invalid("kv_memory_bytes is 0, must be given for sm_90",
                       [&] { (void)Engine::plan(options, kH200); });
  options.max_requests = 0;
  test::expect_invalid("max_requests is 0", [&] { (void)Engine::plan(options); });
}

// More rows than a feed-forward block computes at a time. The bits equal those of shorter passes.
TEST(LongPasses, HaveTheBitsOfShortOnes) {
  for (const std::string model : {"llama", "gpt_oss"}) {
    SCOPED_TRACE(model);
    const auto generate = [&](int32_t batch_tokens) {
      EngineOptions options = small_options(model);
      options.kv_memory_bytes = size_t{256} << 20;
      options.max_context = 512;
      options.max_requests = 32;
      options.max_batch_tokens = batch_tokens;
      options.batch_invariant = true;
      options.threads = 2;
      const std::unique_ptr<Engine> engine = Engine::load(options);
      std::vector<GenerateRequest> requests(21);
      for (size_t i = 0; i < requests.size(); ++i) {
        for (size_t t = 0; t < 400; ++t) {
          requests[i].tokens.push_back(static_cast<int32_t>((7 * t + 131 * i + t * t) % 2000));
        }
        requests[i].sampling.max_new_tokens = 1;
        requests[i].sampling.logprobs = 5;
      }
      std::vector<float> logprobs;
      for (const GenerateResult& result : engine->generate(requests)) {
        for (const TokenLogprob& top : result.top.at(0)) logprobs.push_back(top.logprob);
      }
      EXPECT_EQ(engine->stats().steps, (21 * 400 + batch_tokens - 1) / batch_tokens);
      return logprobs;
    };
    EXPECT_EQ(generate(8400), generate(2100));
  }
}

}  // namespace
}  // namespace fovea
