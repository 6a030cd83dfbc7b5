// SPDX-License-Identifier: Apache-2.0
// Drafts of an EAGLE-3 head: they are those of its reference, whatever became of the request's
// memory, and text is that without. Other tests add all kinds of requests and memory pressure.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/load_engine.h"
#include "engine/small_engine.h"
#include "fovea/engine.h"
#include "fovea/parallel_engine.h"
#include "model/json_object.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

const std::string kDrafts = FOVEA_SOURCE_DIR "/testdata/drafts/";
const std::string kHeadFolder = kDrafts + "llama_eagle";

// A model of testdata and its head.
struct TrainedHead {
  const char* model;
  const char* folder;
};
constexpr TrainedHead kHeads[] = {
    {"llama", "llama_eagle"}, {"deepseek_v3", "deepseek_v3_mtp"}, {"qwen3_next", "qwen3_next_mtp"}};

EngineOptions eagle_options(const std::string& model = "llama",
                            const std::string& head = kHeadFolder) {
  EngineOptions options = small_options(model);
  options.batch_invariant = true;
  options.record_steps = true;
  if (head.empty()) return options;
  options.speculate = "eagle:" + head;
  options.always_speculate = true;
  return options;
}

class Eagle : public ::testing::TestWithParam<TrainedHead> {
 protected:
  std::string model() const { return GetParam().model; }
  std::string folder() const { return kDrafts + GetParam().folder; }
  EngineOptions options() const { return eagle_options(model(), folder()); }
  EngineOptions plain_options() const { return eagle_options(model(), ""); }
};
INSTANTIATE_TEST_SUITE_P(Heads, Eagle, ::testing::ValuesIn(kHeads),
                         [](const auto& test) { return std::string(test.param.folder); });

// Returns how many drafts each step with drafts has accepted.
std::vector<int64_t> accepted_by_step(Engine& engine) {
  std::vector<int64_t> accepted;
  for (const StepRecord& record : engine.take_step_records())
    if (record.drafts > 0) accepted.push_back(record.accepted_drafts);
  return accepted;
}

// The reference computes whole texts anew in torch, see tools/train_eagle.py. Steps of 24 tokens
// cut prompts into pieces, which the head computes in pieces, too.
TEST_P(Eagle, StepsAcceptAsManyDraftsAsTheReference) {
  const JsonObject reference = JsonObject::open(folder() + "/reference.json");
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  for (const auto& [step_tokens, runner_draws] :
       {std::pair(64, false), std::pair(64, true), std::pair(24, false), std::pair(24, true)}) {
    SCOPED_TRACE(std::to_string(step_tokens) + (runner_draws ? ", drawn by the runner" : ""));
    EngineOptions own = options();
    own.max_drafts = static_cast<int32_t>(reference.integer("max_drafts", 1, 63));
    own.max_batch_tokens = step_tokens;
    const std::unique_ptr<Engine> engine = load_engine(own, {}, runner_draws);
    for (size_t i = 0; i < 3; ++i) {
      const GenerateRequest request = greedy_request(prompts[i]);
      EXPECT_EQ(engine->generate({&request, 1}).front().tokens, prompts[i].greedy);
      EXPECT_EQ(accepted_by_step(*engine),
                reference.integers("prompt_" + std::to_string(i), 0, own.max_drafts));
    }
    const EngineStats& stats = engine->stats();
    EXPECT_GT(stats.accepted_drafts, stats.draft_requests) << "drafts per request and step";
    const int64_t alone = stats.accepted_drafts;
    std::vector<GenerateRequest> together;
    for (size_t i = 0; i < 3; ++i) together.push_back(greedy_request(prompts[i]));
    (void)engine->generate(together);
    EXPECT_EQ(stats.accepted_drafts, 2 * alone) << "the same in one batch";
    expect_no_leak(*engine);
  }
}

std::vector<GenerateRequest> sampled_requests() {
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 6; ++i) {
    GenerateRequest& request = requests.emplace_back(text_request(kPrompt, 30 + 5 * i));
    request.sampling.temperature = 0.4f * static_cast<float>(i);
    request.sampling.seed = static_cast<uint64_t>(i);
    if (i == 4) request.sampling.top_k = 20;
    if (i == 5) request.sampling.top_p = 0.8f;
  }
  return requests;
}

void expect_equal_texts(Engine& seen, Engine& wanted,
                        const std::vector<GenerateRequest>& requests) {
  const std::vector<GenerateResult> a = seen.generate(requests), b = wanted.generate(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(a[i].tokens, b[i].tokens);
    EXPECT_EQ(a[i].finish, b[i].finish) << a[i].error;
  }
}

// Features are those of cache slots, so a request that finds its prompt in the cache has them. The
// head has a cache of its own, or computes the prompt anew.
TEST_P(Eagle, DraftsAreTheSameAfterAPrefixHit) {
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  GenerateRequest request = greedy_request(prompts[2]);
  for (const float temperature : {0.0f, 0.8f}) {
    const std::unique_ptr<Engine> engine = Engine::load(options());
    request.sampling.temperature = temperature;
    request.sampling.seed = 5;
    request.salt.clear();
    const GenerateResult first = engine->generate({&request, 1}).front();
    const std::vector<int64_t> accepted = accepted_by_step(*engine);
    for (int round = 0; round < 4; ++round) {
      const GenerateResult again = engine->generate({&request, 1}).front();
      EXPECT_EQ(again.tokens, first.tokens);
      EXPECT_EQ(again.cached_tokens > 0, round != 2) << "another salt shares nothing";
      EXPECT_EQ(accepted_by_step(*engine), accepted);
      if (round == 1) request.salt = "another";
    }
    GenerateRequest longer = request;  // the head's entry before the new token is another
    longer.tokens.resize(96);
    longer.tokens.push_back(77);
    longer.sampling.max_new_tokens = 40;
    const std::vector<int32_t> with_hit = engine->generate({&longer, 1}).front().tokens;
    const std::vector<int64_t> accepted_with_hit = accepted_by_step(*engine);
    const std::unique_ptr<Engine> cold = Engine::load(options());
    EXPECT_EQ(with_hit, cold->generate({&longer, 1}).front().tokens);
    EXPECT_EQ(accepted_with_hit, accepted_by_step(*cold));
    expect_no_leak(*engine);
  }
}

TEST_P(Eagle, SampledTextIsThatWithout) {
  const std::unique_ptr<Engine> plain = Engine::load(plain_options());
  for (const bool runner_draws : {false, true}) {
    const std::unique_ptr<Engine> engine = load_engine(options(), {}, runner_draws);
    expect_equal_texts(*engine, *plain, sampled_requests());
    const EngineStats& stats = engine->stats();
    EXPECT_GT(stats.accepted_drafts, stats.drafts / 10);
    EXPECT_LT(stats.accepted_drafts, stats.drafts);
    expect_no_leak(*engine);
  }
}

// Returns the tokens of a step on average, of greedy texts.
double tokens_a_step(const EngineOptions& options, const std::vector<ReferencePrompt>& prompts) {
  const std::unique_ptr<Engine> engine = Engine::load(options);
  for (size_t i = 0; i < 3; ++i) {
    const GenerateRequest request = greedy_request(prompts[i]);
    EXPECT_EQ(engine->generate({&request, 1}).front().tokens, prompts[i].greedy);
  }
  const EngineStats& stats = engine->stats();
  return 1 + static_cast<double>(stats.accepted_drafts) / static_cast<double>(stats.draft_requests);
}

TEST_P(Eagle, TreesHaveMoreDraftsThatAreRightThanChains) {
  EngineOptions own = options();
  if (model() == "qwen3_next") {
    own.draft_branches = 2;
    for (const bool plans : {false, true}) {
      test::expect_error(ErrorCode::unsupported,
                         "draft_branches is 2, but Qwen3NextForCausalLM has recurrent states",
                         [&] { plans ? (void)Engine::plan(own) : (void)Engine::load(own); });
    }
    return;
  }
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  own.max_drafts = 16;
  const double chains = tokens_a_step(own, prompts);
  for (const int32_t branches : {2, 3, 4}) {
    own.draft_branches = branches;
    EXPECT_GT(tokens_a_step(own, prompts), chains) << branches << " branches";
  }
}

// The rows of accepted drafts have moved, in the caches and in the features, before their pages
// serve another request.
TEST_P(Eagle, DraftsAfterATextOfTreesAreThoseAfterItsPrompt) {
  if (model() == "qwen3_next") return;
  EngineOptions own = options();
  own.draft_branches = 4;
  own.max_drafts = 8;
  const std::vector<ReferencePrompt> prompts = read_reference(model());
  std::vector<int64_t> accepted[2];  // after the text, and after a prompt
  for (size_t i = 0; i < 3; ++i) {
    for (const float temperature : {0.0f, 0.5f, 1.0f}) {
      GenerateRequest request = greedy_request(prompts[i]);
      request.sampling.temperature = temperature;
      request.sampling.max_new_tokens = 90;
      const std::unique_ptr<Engine> engine = Engine::load(own);
      const std::vector<int32_t> text = engine->generate({&request, 1}).front().tokens;
      request.tokens.insert(request.tokens.end(), text.begin(), text.end());
      request.sampling.max_new_tokens = 40;
      (void)accepted_by_step(*engine);
      const GenerateResult warm = engine->generate({&request, 1}).front();
      EXPECT_GT(warm.cached_tokens, static_cast<int32_t>(request.tokens.size()) - 17);
      const std::unique_ptr<Engine> cold = Engine::load(own);
      EXPECT_EQ(warm.tokens, cold->generate({&request, 1}).front().tokens);
      for (const int64_t count : accepted_by_step(*engine)) accepted[0].push_back(count);
      for (const int64_t count : accepted_by_step(*cold)) accepted[1].push_back(count);
    }
  }
  EXPECT_EQ(accepted[0], accepted[1]);
}

TEST(EagleRanks, DraftAlike) {
  const std::unique_ptr<Engine> ranks =
      load_parallel_engine(eagle_options(), {.tensor_parallel = 2});
  const std::unique_ptr<Engine> plain = Engine::load(eagle_options("llama", ""));
  expect_equal_texts(*ranks, *plain, sampled_requests());
  EXPECT_GT(ranks->stats().accepted_drafts, ranks->stats().drafts / 10);
  test::expect_error(ErrorCode::unsupported, "of the model's head each rank has a part", [] {
    (void)load_parallel_engine(eagle_options("deepseek_v3", kDrafts + "deepseek_v3_mtp"),
                               {.tensor_parallel = 2});
  });
}

TEST(EagleHeads, MeasuredWidthsTurnItOffAndOn) {
  EngineOptions options = eagle_options();
  options.always_speculate = false;
  const std::unique_ptr<Engine> engine = Engine::load(options);
  const std::unique_ptr<Engine> plain = Engine::load(eagle_options("llama", ""));
  std::vector<GenerateRequest> requests;
  for (int i = 0; i < 4; ++i) {
    requests.push_back(text_request(kPrompt, 150));
    requests.back().sampling.temperature = 0.3f * static_cast<float>(i);
  }
  expect_equal_texts(*engine, *plain, requests);
  const EngineStats& stats = engine->stats();
  EXPECT_GT(stats.drafts, 0);
  EXPECT_LT(stats.draft_steps, stats.steps) << "some steps are measured without";
  EXPECT_GT(stats.speculation_gain, 0);
}

// Every model notes features, and its text does not change. Weights are random, so that no draft is
// right but by chance.
TEST(EagleHeads, HeadsOfAllModels) {
  for (const std::string model :
       {"llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_next"}) {
    SCOPED_TRACE(model);
    EngineOptions options = eagle_options(model);
    options.random_weights = 3;
    if (model == "deepseek_v3") {  // three layers
      test::expect_invalid("the head reads the stream before layer 3, the model has 3 layers",
                           [&] { (void)Engine::load(options); });
      continue;
    }
    const std::unique_ptr<Engine> engine = Engine::load(options);
    options.speculate.clear();
    options.always_speculate = false;
    expect_equal_texts(*engine, *Engine::load(options), sampled_requests());
    EXPECT_GT(engine->stats().drafts, 100);
    expect_no_leak(*engine);
  }
}

TEST_P(Eagle, PlanCountsItsMemory) {
  const EngineMemory planned = Engine::plan(options()).memory;
  const std::unique_ptr<Engine> engine = Engine::load(options());
  EXPECT_EQ(planned.drafter, engine->stats().memory.drafter);
  EXPECT_EQ(planned.total(), engine->stats().memory.total());
  const int64_t slots = (engine->stats().kv_pages + 1) * options().page_size;
  EXPECT_GT(planned.drafter, static_cast<size_t>(slots) * 128 * sizeof(float))
      << "the features of every slot";
  const DeviceInfo gpu{.kind = DeviceKind::cuda, .name = "sm_90", .sm = 90, .cores = 132};
  EngineOptions on_gpu = options();
  on_gpu.kv_dtype = DType::bf16;
  const EngineMemory with_head = Engine::plan(on_gpu, gpu).memory;
  on_gpu.speculate = "ngram";
  const EngineMemory without = Engine::plan(on_gpu, gpu).memory;
  EXPECT_GT(with_head.drafter, 0u);
  EXPECT_GT(with_head.activations, without.activations) << "the streams that are noted";
}

// A head's folder with a changed config, next to the weights of testdata's.
class ChangedHead {
 public:
  explicit ChangedHead(const std::vector<std::pair<std::string, std::string>>& changes) {
    std::filesystem::create_directories(folder_);
    std::filesystem::copy(kHeadFolder + "/model.safetensors", folder_ + "/model.safetensors",
                          std::filesystem::copy_options::overwrite_existing);
    std::ifstream in(kHeadFolder + "/config.json");
    std::string text{std::istreambuf_iterator<char>(in), {}};
    for (const auto& [from, to] : changes) {
      const size_t at = text.find(from);
      EXPECT_NE(at, std::string::npos) << from;
      text.replace(at, from.size(), to);
    }
    std::ofstream(folder_ + "/config.json") << text;
  }
  ~ChangedHead() { std::filesystem::remove_all(folder_); }
  EngineOptions options() const { return eagle_options("llama", folder_); }

 private:
  const std::string folder_ = testing::TempDir() + "changed_head";
};

TEST(EagleHeads, RefusesHeadsThatDoNotFitByName) {
  const auto refused = [](ErrorCode code, const std::string& message,
                          const std::vector<std::pair<std::string, std::string>>& changes) {
    SCOPED_TRACE(message);
    const ChangedHead head(changes);
    test::expect_error(code, message, [&] { (void)Engine::load(head.options()); });
    test::expect_error(code, message, [&] { (void)Engine::plan(head.options()); });
  };
  refused(ErrorCode::invalid_argument,
          "the head has a vocabulary of 4096 tokens, the model of 2048",
          {{"\"vocab_size\": 2048", "\"vocab_size\": 4096"}});
  refused(ErrorCode::invalid_argument,
          "made for a model whose hidden states have 256 values, those of the model have 128",
          {{"\"hidden_size\": 128", "\"hidden_size\": 256"}});
  refused(ErrorCode::invalid_argument,
          "the head reads the stream before layer 4, the model has 4 layers",
          {{"    0,\n", "    3,\n"}});
  refused(ErrorCode::corrupt_file, "fc.weight", {{"    0,\n", ""}});
  refused(ErrorCode::unsupported, "num_hidden_layers is 2; heads of one layer are supported",
          {{"\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2"}});
  refused(ErrorCode::unsupported, "the architecture is 'LlamaForCausalLM'; heads are Llama",
          {{"LlamaForCausalLMEagle3", "LlamaForCausalLM"}});
  refused(ErrorCode::unsupported, "norm_before_residual is true",
          {{"\"num_hidden_layers\"", "\"norm_before_residual\": true, \"num_hidden_layers\""}});
  refused(ErrorCode::corrupt_file, "lm_head.weight",
          {{"\"draft_vocab_size\": 1024", "\"draft_vocab_size\": 512"}});
  test::expect_error(ErrorCode::unsupported, "the architecture is 'Qwen3ForCausalLM'; heads",
                     [] { (void)Engine::load(eagle_options("llama", model_folder("qwen3"))); });
  test::expect_error(ErrorCode::corrupt_file, "mtp.", [] {
    (void)Engine::load(eagle_options("qwen3_next", model_folder("qwen3_next")));
  });
  test::expect_invalid("the MTP layer follows 3 layers, the model has 4", [] {
    (void)Engine::load(eagle_options("llama", kDrafts + "deepseek_v3_mtp"));
  });
  EngineOptions options = eagle_options();
  options.speculate = "eagle:";
  test::expect_invalid(
      "speculate is 'eagle:', must be ngram, draft:MODEL, eagle:HEAD, oracle:LENGTH or empty",
      [&] { (void)Engine::load(options); });
  options.speculate = "eagle:/nowhere";
  test::expect_error(ErrorCode::io, "/nowhere", [&] { (void)Engine::load(options); });
}

// The list of layers at the top level names those before which the streams are taken.
TEST(EagleHeads, BothListsOfLayersAreRead) {
  const ChangedHead head({{"\"eagle_config\"", "\"other_config\""},
                          {"\"draft_vocab_size\"",
                           "\"eagle_aux_hidden_state_layer_ids\": [1, 2, 3], "
                           "\"draft_vocab_size\""}});
  const GenerateRequest request = greedy_request(read_reference("llama")[1]);
  const std::unique_ptr<Engine> seen = Engine::load(head.options());
  const std::unique_ptr<Engine> wanted = Engine::load(eagle_options());
  (void)seen->generate({&request, 1});
  (void)wanted->generate({&request, 1});
  EXPECT_EQ(accepted_by_step(*seen), accepted_by_step(*wanted));
}

}  // namespace
}  // namespace fovea
