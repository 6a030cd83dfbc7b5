// SPDX-License-Identifier: Apache-2.0
// Every checkpoint of testdata/models compared with transformers' results: logits, 64 greedy tokens
// and perplexity, on every CPU backend, for any cuts and batches of the prompts. The tiny ones of
// testdata/goldens have logits only.
#include <gtest/gtest.h>

#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "model_driver.h"
#include "parity_limits.h"
#include "support/cases.h"
#include "support/reference_file.h"

namespace fovea {
namespace {

const ParityLimits kLimits;

struct Prompt {
  std::vector<int32_t> tokens, greedy;
  std::vector<float> last_logits;
  std::vector<float> logits;  // [tokens, vocabulary], for short prompts only
};

std::vector<Prompt> read_prompts(const SafetensorsFile& file) {
  std::vector<Prompt> prompts;
  for (int i = 0;; ++i) {
    const std::string prefix = "prompt_" + std::to_string(i) + ".";
    if (!file.contains(prefix + "input_ids")) return prompts;
    prompts.push_back({values_of<int32_t>(file, prefix + "input_ids"),
                       values_of<int32_t>(file, prefix + "greedy_64"),
                       values_of<float>(file, prefix + "last_logits"),
                       values_of<float>(file, prefix + "logits")});
  }
}

float largest_difference(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  float largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const float difference = std::fabs(a[i] - b[i]);
    // A NaN, including the difference of two infinities, counts as infinitely far.
    largest = std::max(largest, std::isnan(difference) ? INFINITY : difference);
  }
  return largest;
}

int32_t largest_index(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double log_probability(std::span<const float> logits, int32_t token) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit - most));
  return logits[static_cast<size_t>(token)] - most - std::log(sum);
}

struct Case {
  std::string model;
  std::string backend;
};

void PrintTo(const Case& test, std::ostream* out) { *out << test.model << " on " << test.backend; }

class Parity : public testing::TestWithParam<Case> {
 protected:
  Parity()
      : reference_(reference_file(GetParam().model)),
        prompts_(read_prompts(reference_)),
        driver_(model_folder(GetParam().model), {.backend = GetParam().backend}, threads_) {}

  // Returns the largest difference over a prompt that is fed in pieces of `piece` tokens.
  float prompt_difference(const Prompt& prompt, size_t piece) {
    const auto vocabulary = static_cast<size_t>(driver_.info().vocabulary);
    const int32_t request = driver_.open();
    const std::span<const int32_t> tokens(prompt.tokens);
    float largest = 0;
    for (size_t begin = 0; begin < tokens.size(); begin += piece) {
      const size_t count = std::min(piece, tokens.size() - begin);
      const std::vector<ModelDriver::Work> work = {{request, tokens.subspan(begin, count)}};
      const std::span<const float> logits = driver_.run(work, true);
      if (!prompt.logits.empty()) {
        const auto want = std::span(prompt.logits).subspan(begin * vocabulary, logits.size());
        largest = std::max(largest, largest_difference(logits, want));
      }
      if (begin + count == tokens.size()) {
        largest =
            std::max(largest, largest_difference(logits.last(vocabulary), prompt.last_logits));
      }
    }
    driver_.close(request);
    return largest;
  }

  ThreadPool threads_;
  SafetensorsFile reference_;
  std::vector<Prompt> prompts_;
  ModelDriver driver_;
};

TEST_P(Parity, PromptsGiveTheReferenceLogits) {
  ASSERT_EQ(prompts_.size(), 5u);
  for (const Prompt& prompt : prompts_) {
    const float difference = prompt_difference(prompt, prompt.tokens.size());
    EXPECT_LE(difference, kLimits.logit) << prompt.tokens.size() << " tokens";
    RecordProperty("tokens_" + std::to_string(prompt.tokens.size()), std::to_string(difference));
  }
}

TEST_P(Parity, PiecesOfPromptsGiveTheReferenceLogits) {
  EXPECT_LE(prompt_difference(prompts_[1], 1), kLimits.logit);
  EXPECT_LE(prompt_difference(prompts_[2], 1), kLimits.logit);
  EXPECT_LE(prompt_difference(prompts_[3], 113), kLimits.logit);
}

// All prompts at once, in pieces: requests that still read their prompt share passes with requests
// that already decode.
TEST_P(Parity, BatchesGiveTheReferenceTokens) {
  constexpr size_t kPiece = 150;
  const auto vocabulary = static_cast<size_t>(driver_.info().vocabulary);
  struct State {
    int32_t request = 0;
    std::vector<int32_t> tokens;  // prompt and generated tokens
    size_t done = 0;
  };
  std::vector<State> states;
  for (const Prompt& prompt : prompts_) states.push_back({driver_.open(), prompt.tokens, 0});

  for (;;) {
    std::vector<ModelDriver::Work> work;
    std::vector<size_t> owners;
    for (size_t i = 0; i < states.size(); ++i) {
      State& state = states[i];
      // The very last token is not fed.
      const size_t greedy = std::max<size_t>(prompts_[i].greedy.size(), 1);
      if (state.done == prompts_[i].tokens.size() + greedy - 1) continue;
      const size_t count = std::min(kPiece, state.tokens.size() - state.done);
      work.push_back({state.request, std::span(state.tokens).subspan(state.done, count)});
      owners.push_back(i);
      state.done += count;
    }
    if (work.empty()) break;
    const std::span<const float> logits = driver_.run(work, false);
    for (size_t i = 0; i < owners.size(); ++i) {
      State& state = states[owners[i]];
      if (state.done < state.tokens.size()) continue;
      const auto row = logits.subspan(i * vocabulary, vocabulary);
      const Prompt& prompt = prompts_[owners[i]];
      if (state.done == prompt.tokens.size()) {
        EXPECT_LE(largest_difference(row, prompt.last_logits), kLimits.logit);
      }
      if (state.tokens.size() < prompt.tokens.size() + prompt.greedy.size()) {
        state.tokens.push_back(largest_index(row));
      }
    }
  }
  for (size_t i = 0; i < states.size(); ++i) {
    const auto prompt_size = static_cast<std::ptrdiff_t>(prompts_[i].tokens.size());
    const std::vector<int32_t> generated(states[i].tokens.begin() + prompt_size,
                                         states[i].tokens.end());
    EXPECT_EQ(generated, prompts_[i].greedy) << "prompt " << i;
  }
}

class Perplexity : public Parity {};

TEST_P(Perplexity, OfTheValidationTextIsTheReferences) {
  const JsonObject validation =
      JsonObject::open(model_folder(GetParam().model) + "/reference.json").object("validation");
  const auto windows = static_cast<size_t>(validation.integer("windows", 1, 1000));
  const auto length = static_cast<size_t>(validation.integer("tokens_per_window", 2, 1024));
  const std::vector<int32_t> tokens = values_of<int32_t>(reference_, "validation.input_ids");
  ASSERT_EQ(tokens.size(), windows * length);

  const auto vocabulary = static_cast<size_t>(driver_.info().vocabulary);
  double nll = 0;
  for (size_t window = 0; window < windows; ++window) {
    const int32_t request = driver_.open();
    const std::span<const int32_t> text = std::span(tokens).subspan(window * length, length);
    const std::vector<ModelDriver::Work> work = {{request, text}};
    const std::span<const float> logits = driver_.run(work, true);
    for (size_t i = 0; i + 1 < length; ++i) {
      nll -= log_probability(logits.subspan(i * vocabulary, vocabulary), text[i + 1]);
    }
    driver_.close(request);
  }
  const double perplexity = std::exp(nll / static_cast<double>(windows * (length - 1)));
  const double expected = validation.number("perplexity", 1, 1e9);
  EXPECT_NEAR(perplexity, expected, kLimits.perplexity * expected);
  RecordProperty("perplexity", std::to_string(perplexity));
}

const std::vector<std::string> kTrained = {"llama",       "qwen3",       "gemma2",    "gpt_oss",
                                           "deepseek_v3", "llama4_text", "qwen3_next"};

std::vector<Case> cases_of(const std::vector<std::string>& models,
                           std::initializer_list<const char*> backends) {
  std::vector<Case> all;
  for (const char* backend : backends) {
    for (const std::string& model : models) all.push_back({model, backend});
  }
  return all;
}

// `reference` takes half a minute per model.
std::vector<Case> perplexity_cases() {
  return test::test_scale() > 1 ? cases_of(kTrained, {"cpu", "reference"})
                                : cases_of(kTrained, {"cpu"});
}

std::string case_name(const testing::TestParamInfo<Case>& test) {
  return test.param.model + "_" + test.param.backend;
}

INSTANTIATE_TEST_SUITE_P(Models, Parity,
                         testing::ValuesIn(cases_of(kTrained, {"cpu", "reference"})), case_name);
INSTANTIATE_TEST_SUITE_P(Goldens, Parity,
                         testing::ValuesIn(cases_of(golden_models(), {"cpu", "reference"})),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Models, Perplexity, testing::ValuesIn(perplexity_cases()), case_name);

}  // namespace
}  // namespace fovea
