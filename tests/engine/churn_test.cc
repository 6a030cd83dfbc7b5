// SPDX-License-Identifier: Apache-2.0
// Text served through cached prefixes, preemption and cancellation in a pool for little more than
// one prompt is the text of an engine that does none of it.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <vector>

#include "engine/reference_text.h"
#include "fovea/engine.h"
#include "fovea/error.h"
#include "support/cases.h"

namespace fovea {
namespace {

constexpr int32_t kPageSize = 16;
constexpr int32_t kContext = 112;
constexpr int32_t kNewTokens = 8;

EngineOptions roomy_options(const std::string& model) {
  EngineOptions options;
  options.model_path = model_folder(model);
  options.page_size = kPageSize;
  options.kv_memory_bytes = size_t{64} << 20;
  options.max_context = kContext;
  options.max_requests = 4;
  options.max_batch_tokens = 48;
  options.threads = 1;
  options.prefix_cache = false;
  return options;
}

bool has_states(const std::string& model) { return model == "qwen3_next"; }

// An engine whose full pools hold 1.2 times the longest request. With linear layers: one with four
// states for four requests and all snapshots, of 230 KB each beside pages of 32 KB.
std::unique_ptr<Engine> tight_engine(const std::string& model) {
  constexpr int64_t kPages = kContext / kPageSize * 12 / 10;
  EngineOptions options = roomy_options(model);
  options.prefix_cache = true;
  if (has_states(model)) {
    options.kv_memory_bytes = 2'100'000;
    return Engine::load(options);
  }
  size_t low = size_t{64} << 10, high = options.kv_memory_bytes;
  while (low + 1 < high) {
    options.kv_memory_bytes = low + (high - low) / 2;
    bool fits = false;
    try {
      fits = Engine::load(options)->stats().kv_pages >= kPages;
    } catch (const Error&) {
    }
    (fits ? high : low) = options.kv_memory_bytes;
  }
  options.kv_memory_bytes = high;
  return Engine::load(options);
}

class Churn : public ::testing::TestWithParam<const char*> {
 protected:
  Churn()
      : text_(read_tensor<int32_t>(
            SafetensorsFile::open(model_folder(GetParam()) + "/reference.safetensors"),
            "validation.input_ids")) {}

  // A beginning that others share, just around a page boundary, and an end of its own.
  std::vector<int32_t> random_prompt() {
    const size_t base = random_() % 3 * 2000;
    const size_t pages = 1 + random_() % 4;
    const size_t shared = pages * kPageSize - 1 + random_() % 3;
    const size_t own = 1 + random_() % (kContext - kNewTokens - shared);
    std::vector<int32_t> tokens(text_.begin() + static_cast<int64_t>(base),
                                text_.begin() + static_cast<int64_t>(base + shared));
    const size_t from = random_() % 8 * 500;
    tokens.insert(tokens.end(), text_.begin() + static_cast<int64_t>(from),
                  text_.begin() + static_cast<int64_t>(from + own));
    return tokens;
  }

  std::vector<int32_t> text_;
  std::mt19937 random_{11};
};

TEST_P(Churn, TokensEqualThoseOfTheColdPath) {
  const std::unique_ptr<Engine> cold = Engine::load(roomy_options(GetParam()));
  const std::unique_ptr<Engine> engine = tight_engine(GetParam());
  std::map<int64_t, GenerateRequest> requests;
  std::map<int64_t, std::vector<int32_t>> produced;
  const int total = 60 * test::test_scale();
  int added = 0, compared = 0, cancelled = 0;
  int64_t cached_tokens = 0;
  while (added < total || !engine->idle()) {
    if (added < total && random_() % 3 == 0) {
      GenerateRequest request;
      request.tokens = random_prompt();
      request.sampling.max_new_tokens = kNewTokens;
      request.sampling.ignore_eos = true;
      requests[engine->add(request)] = request;
      ++added;
    }
    if (random_() % 24 == 0 && !requests.empty())
      engine->cancel(std::next(requests.begin(), random_() % requests.size())->first);
    for (const TokenEvent& event : engine->step()) {
      if (event.token >= 0) produced[event.request].push_back(event.token);
      if (event.finish == FinishReason::none) continue;
      cached_tokens += event.cached_tokens;
      if (event.finish == FinishReason::cancelled) {
        ++cancelled;
      } else {
        const GenerateRequest& request = requests.at(event.request);
        EXPECT_EQ(produced[event.request], cold->generate({&request, 1}).front().tokens)
            << "prompt of " << request.tokens.size();
        ++compared;
      }
      requests.erase(event.request);
    }
  }
  EXPECT_EQ(compared + cancelled, total);
  EXPECT_GT(cancelled, 0);
  EXPECT_GT(cached_tokens, 0);
  if (!has_states(GetParam())) {
    EXPECT_GT(engine->stats().preemptions, 0);
  }
  engine->clear_prefix_cache();
  EXPECT_EQ(engine->stats().kv_pages_free, engine->stats().kv_pages);
}

INSTANTIATE_TEST_SUITE_P(Models, Churn, ::testing::ValuesIn(kTestModels),
                         [](const auto& name) { return std::string(name.param); });

}  // namespace
}  // namespace fovea
