// SPDX-License-Identifier: Apache-2.0
// Loading an engine: refusals, memory, backends, batch invariance, reduced caches.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/available_memory.h"
#include "engine/load_engine.h"
#include "engine/small_engine.h"
#include "model/patched_model.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

TEST(EngineOptions, AreCheckedByName) {
  const auto refused = [](const std::string& field, ErrorCode code,
                          const std::function<void(EngineOptions&)>& change) {
    EngineOptions options = small_options();
    change(options);
    test::expect_error(code, field, [&] { (void)Engine::load(options); });
  };
  constexpr ErrorCode kInvalid = ErrorCode::invalid_argument;
  for (const int32_t value : {-1, 0, std::numeric_limits<int32_t>::max()}) {
    refused("page_size", kInvalid, [&](auto& o) { o.page_size = value; });
    refused("max_requests", kInvalid, [&](auto& o) { o.max_requests = value; });
    refused("max_batch_tokens", kInvalid, [&](auto& o) { o.max_batch_tokens = value; });
  }
  refused("max_mixed_tokens is -1", kInvalid, [](auto& o) { o.max_mixed_tokens = -1; });
  refused("max_mixed_tokens is 65, must be in [0, 64]", kInvalid, [](auto& o) {
    o.max_batch_tokens = 64;
    o.max_mixed_tokens = 65;
  });
  refused("max_context", kInvalid, [](auto& o) { o.max_context = -1; });
  refused("max_graph_requests is 0", kInvalid, [](auto& o) { o.max_graph_requests = 0; });
  refused("prefix_levels is 5", kInvalid, [](auto& o) { o.prefix_levels = 5; });
  refused("min_prefix_savings is -1", kInvalid, [](auto& o) { o.min_prefix_savings = -1; });
  refused("max_context is 8193", kInvalid, [](auto& o) { o.max_context = 8193; });
  refused("speculate is 'medusa', must be ngram", kInvalid,
          [](auto& o) { o.speculate = "medusa"; });
  for (const int32_t value : {-1, 0, 64}) {
    refused("max_drafts", kInvalid, [&](auto& o) { o.max_drafts = value; });
  }
  for (const char* length : {"", "0.9", "5.1", "2x", "nan"}) {
    refused("its length must be a number in [1, 5]", kInvalid, [&](auto& o) {
      o.speculate = std::string("oracle:") + length;
      o.random_weights = 1;
    });
  }
  refused("but random_weights is not given", kInvalid, [](auto& o) { o.speculate = "oracle:2.7"; });
  refused("always_speculate is true, but speculate is empty", kInvalid,
          [](auto& o) { o.always_speculate = true; });
  for (const int32_t value : {0, 9}) {
    refused("draft_branches is " + std::to_string(value) + ", must be in [1, 8]", kInvalid,
            [&](auto& o) { o.draft_branches = value; });
  }
  for (const char* drafter : {"", "ngram"}) {
    refused("draft_branches is 2, which needs drafts of a model or a head", kInvalid, [&](auto& o) {
      o.speculate = drafter;
      o.draft_branches = 2;
    });
  }
  refused("does not work with overlap", kInvalid, [](auto& o) {
    o.speculate = "ngram";
    o.overlap = true;
  });
  refused("threads", kInvalid, [](auto& o) { o.threads = -1; });
  refused("kv_dtype", kInvalid, [](auto& o) { o.kv_dtype = DType::i32; });
  refused("kv_scale", kInvalid, [](auto& o) { o.kv_scale = KvScale::per_head; });
  refused("model_path", kInvalid, [](auto& o) { o.model_path.clear(); });
  refused("config.json", ErrorCode::io, [](auto& o) { o.model_path = "/nonexistent"; });
  refused("no_such_backend", kInvalid,
          [](auto& o) { o.backend = parse_backend_wish("no_such_backend"); });
  refused("budget", ErrorCode::out_of_memory, [](auto& o) { o.kv_memory_bytes = 100000; });
  refused("budget", ErrorCode::out_of_memory, [](auto& o) {
    o.kv_memory_bytes = 100;
    o.max_context = 0;
  });
}

std::string notes_of(const Engine& engine) {
  return fmt::format("{}", fmt::join(engine.notes(), "; "));
}

EngineOptions options_of(const PatchedModel& model) {
  EngineOptions options = small_options();
  options.model_path = model.folder();
  return options;
}

TEST(EngineOptions, ServeContextsOfMillions) {
  const PatchedModel model("llama", {{"max_position_embeddings", 1 << 24}});
  EngineOptions options = options_of(model);
  // Tables of positions are as long as the served context.
  EXPECT_EQ(Engine::load(options)->stats().memory.positions,
            Engine::load(small_options())->stats().memory.positions);
  options.max_context = 300'000;
  options.kv_dtype = DType::bf16;
  options.kv_memory_bytes = size_t{1} << 30;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  EXPECT_EQ(engine->max_context(), 300'000);
  EXPECT_EQ(engine->generate({{text_request(kPrompt, 4)}})[0].tokens,
            shared_engine().generate({{text_request(kPrompt, 4)}})[0].tokens);
  options.max_context = 0;
  options.kv_memory_bytes = size_t{1} << 20;
  EXPECT_EQ(notes_of(*Engine::load(options)),
            "contexts are served up to 4194304 tokens; the model was made for 16777216");
  options.max_context = (1 << 22) + 1;
  test::expect_error(ErrorCode::invalid_argument,
                     "max_context is 4194305, Fovea serves contexts of up to 4194304",
                     [&] { (void)Engine::load(options); });
  options.max_context = (1 << 24) + 1;
  test::expect_error(ErrorCode::invalid_argument,
                     "max_context is 16777217, the model was made for 16777216",
                     [&] { (void)Engine::load(options); });
}

// The frequencies of longrope: the short ones unless the options request a longer context.
TEST(EngineOptions, LongropeServesItsOriginalLengthByDefault) {
  const std::vector<double> ones(32, 1.0), fours(32, 4.0);
  const PatchedModel model("llama", {{"rope_parameters",
                                      {{"rope_type", "longrope"},
                                       {"short_factor", ones},
                                       {"long_factor", fours},
                                       {"attention_factor", 1.0},
                                       {"original_max_position_embeddings", 128}}}});
  EngineOptions options = options_of(model);
  const auto tokens = [&](int32_t context) {
    options.max_context = context;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    EXPECT_EQ(engine->max_context(), context == 0 ? 128 : context);
    EXPECT_EQ(notes_of(*engine), context == 0
                                     ? "contexts are served up to 128 tokens, as longer ones "
                                       "(max_context, up to 8192) change the positions of all "
                                       "requests"
                                     : "");
    return engine->generate({{text_request(kPrompt, 16)}})[0].tokens;
  };
  const std::vector<int32_t> plain =
      shared_engine().generate({{text_request(kPrompt, 16)}})[0].tokens;
  EXPECT_EQ(tokens(0), plain);
  EXPECT_EQ(tokens(128), plain);
  EXPECT_NE(tokens(129), plain);
}

// The checkpoint is shortened while a CPU model reads from it.
TEST(EngineOptions, NameACheckpointThatIsShortenedInUse) {
  namespace fs = std::filesystem;
  const PatchedModel model("llama", nlohmann::json::object());
  const fs::path weights = fs::path(model.folder()) / "model.safetensors";
  const fs::path original = fs::read_symlink(weights);
  fs::remove(weights);
  fs::copy_file(original, weights);
  const std::unique_ptr<Engine> engine = Engine::load(options_of(model));
  engine->add(text_request(kPrompt, 8));
  std::vector<int32_t> tokens;
  const auto step = [&] {
    for (const TokenEvent& event : engine->step()) tokens.push_back(event.token);
  };
  while (tokens.size() < 4) step();
  fs::resize_file(weights, 4096);
  test::expect_error(ErrorCode::io, {weights.string(), "has been shortened from"}, step);
  EXPECT_EQ(tokens.size(), 4u);
  test::expect_error(ErrorCode::io, weights.string(),
                     [&] { (void)engine->generate({{text_request(kPrompt, 8)}}); });
  test::expect_error(ErrorCode::corrupt_file, weights.string(),
                     [&] { (void)Engine::load(options_of(model)); });
}

// Returns the distance of a prompt's last logits from the reference's, relative to these.
double logit_error(Engine& engine, const std::string& model) {
  const ReferencePrompt prompt = read_reference(model)[1];
  const std::vector<float> logits = engine.logits(prompt.tokens);
  const auto width = static_cast<size_t>(engine.vocabulary());
  double error = 0, norm = 0;
  for (size_t i = 0; i < width; ++i) {
    const double expected = prompt.last_logits[i];
    error += std::pow(logits[logits.size() - width + i] - expected, 2);
    norm += expected * expected;
  }
  return std::sqrt(error / norm);
}

TEST(EngineOptions, LatentCachesTakeEveryFp8Format) {
  struct Format {
    DType dtype;
    KvScale asked, stored;
  };
  for (const auto& [dtype, asked, stored] :
       {Format{DType::f8e4m3, KvScale::none, KvScale::none},
        Format{DType::f8e4m3, KvScale::per_tensor, KvScale::per_tensor},
        Format{DType::f8e4m3, KvScale::per_token_head, KvScale::per_token_head},
        Format{DType::f8e5m2, KvScale::none, KvScale::per_token_head}}) {
    EngineOptions options = small_options("deepseek_v3");
    options.kv_dtype = dtype;
    options.kv_scale = asked;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    const KvCacheSpec& cache = engine->selections().front().request.cache;
    EXPECT_EQ(cache.layout, stored == KvScale::none ? KvLayout::mla_fp8_rows : KvLayout::mla);
    EXPECT_EQ(cache.scale, stored);
    EXPECT_LT(logit_error(*engine, "deepseek_v3"), dtype == DType::f8e4m3 ? 8e-2 : 16e-2);
  }
}

TEST(EngineOptions, TheContextShrinksToTheBudget) {
  EngineOptions options = small_options();
  options.max_context = 0;
  options.kv_memory_bytes = size_t{1} << 20;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  EXPECT_LT(engine->max_context(), 8192);
  EXPECT_EQ(engine->wanted_context(), 8192);
  EXPECT_GE(engine->max_context(), 128);
  EXPECT_LE(engine->stats().memory.caches, options.kv_memory_bytes);
  GenerateRequest request = text_request("", 10000);
  request.tokens.assign(static_cast<size_t>(engine->max_context()) - 20, 11);
  EXPECT_EQ(engine->generate({&request, 1}).front().tokens.size(), 20u);
  request.tokens.resize(static_cast<size_t>(engine->max_context()), 11);
  test::expect_error(ErrorCode::invalid_argument, {"the KV budget holds of 8192"},
                     [&] { engine->add(request); });
  expect_no_leak(*engine);
}

// More requests than the budget holds. Other programs allocate and free memory meanwhile.
TEST(EngineOptions, TheBudgetIsHalfOfTheFreeMemory) {
  EngineOptions options = small_options();
  options.kv_memory_bytes = 0;
  options.max_context = 8192;
  options.max_requests = options.max_batch_tokens = 4096;  // 64 MB each
  const size_t before = available_memory();
  const std::unique_ptr<Engine> engine = Engine::load(options);
  const size_t free = std::max(before, available_memory());
  EXPECT_LE(engine->stats().memory.caches, free / 2 + free / 8);
  EXPECT_GE(engine->stats().memory.caches, std::min(free / 4, size_t{200} << 30));
}

TEST(EngineOptions, ExplainNamesTheBackendOfEveryGroup) {
  EngineOptions options = small_options("gemma2");
  options.backend = parse_backend_wish("cpu");
  options.decode_backend = parse_backend_wish("reference");
  const std::unique_ptr<Engine> engine = Engine::load(options);
  const std::string text = engine->explain();
  for (const char* part : {"layers 0, 2, prefill", "layers 1, 3, decode", "cpu", "reference"})
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in\n" << text;
  options.batch_invariant = true;
  test::expect_error(ErrorCode::invalid_argument, {"batch_invariant", "decode_backend"},
                     [&] { (void)Engine::load(options); });
}

TEST(EngineOptions, ExplainSaysWhatWaitsForDrafts) {
  EngineOptions options = small_options("llama");
  EXPECT_EQ(Engine::load(options)->explain().find("drafts"), std::string::npos);
  options.speculate = "eagle:" FOVEA_SOURCE_DIR "/testdata/drafts/llama_eagle";
  for (const bool runner_draws : {false, true}) {
    const std::string text = load_engine(options, {}, runner_draws)->explain();
    EXPECT_NE(text.find(runner_draws ? "made, and the next drafts begin behind it\n"
                                     : "are read before the pass that verifies them begins\n"),
              std::string::npos)
        << text;
  }
  options.speculate = "draft:" + options.model_path;
  EXPECT_NE(load_engine(options, {}, true)->explain().find("is enqueued while these are made\n"),
            std::string::npos);
  options.draft_branches = 2;
  EXPECT_NE(load_engine(options, {}, true)->explain().find("waits for the one before\n"),
            std::string::npos);
}

TEST(EngineOptions, SplitBackendsGiveTheSameText) {
  for (const char* model : {"llama", "gemma2", "deepseek_v3", "qwen3_next"}) {
    EngineOptions options = small_options(model);
    options.backend = parse_backend_wish("cpu");
    options.decode_backend = parse_backend_wish("reference");
    const std::unique_ptr<Engine> engine = Engine::load(options);
    std::vector<GenerateRequest> requests;
    const std::vector<ReferencePrompt> prompts = read_reference(model);
    for (size_t i = 0; i < 3; ++i) {
      requests.push_back(greedy_request(prompts[i]));
      requests.back().sampling.max_new_tokens = 12;
    }
    const std::vector<GenerateResult> results = engine->generate(requests);
    for (size_t i = 0; i < 3; ++i)
      EXPECT_TRUE(
          std::equal(results[i].tokens.begin(), results[i].tokens.end(), prompts[i].greedy.begin()))
          << model << " prompt " << i;
  }
}

// Batch-invariant mode: the bits of a request's logits do not depend on other requests, on chunking
// or on cache hits. Log-probabilities show them.
TEST(EngineOptions, BatchInvariantBits) {
  for (const char* model : {"llama", "gemma2", "deepseek_v3", "qwen3_next"}) {
    EngineOptions options = small_options(model);
    options.batch_invariant = true;
    std::vector<GenerateRequest> requests;
    const std::vector<ReferencePrompt> prompts = read_reference(model);
    for (size_t i = 0; i < 3; ++i) {
      requests.push_back(greedy_request(prompts[i]));
      requests.back().sampling.max_new_tokens = 10;
      requests.back().sampling.logprobs = 5;
    }
    const auto bits = [](const GenerateResult& result) {
      std::vector<float> values = result.logprobs;
      for (const auto& top : result.top)
        for (const TokenLogprob& entry : top) values.push_back(entry.logprob);
      return values;
    };
    std::vector<std::vector<float>> alone;
    for (const GenerateRequest& request : requests) {
      const std::unique_ptr<Engine> engine = Engine::load(options);
      alone.push_back(bits(engine->generate({&request, 1}).front()));
    }
    options.max_batch_tokens = 37;
    const std::unique_ptr<Engine> engine = Engine::load(options);
    for (const bool warm : {false, true}) {
      const std::vector<GenerateResult> batched = engine->generate(requests);
      for (size_t i = 0; i < requests.size(); ++i)
        EXPECT_EQ(bits(batched[i]), alone[i]) << model << " prompt " << i << " warm " << warm;
    }
  }
}

TEST(EngineOptions, ReducedCachesStayCloseToTheText) {
  for (const char* model : {"llama", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"}) {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f8e4m3}) {
      EngineOptions options = small_options(model);
      options.kv_dtype = dtype;
      const double error = logit_error(*Engine::load(options), model);
      // Each cached value is rounded once, so the relative error stays near the format's.
      const double limit = dtype == DType::f16 ? 2e-3 : dtype == DType::bf16 ? 1e-2 : 8e-2;
      EXPECT_LT(error, limit) << model << " " << dtype_name(dtype);
      EXPECT_GT(error, 0) << model << " " << dtype_name(dtype) << " changed nothing";
    }
  }
}

}  // namespace
}  // namespace fovea
