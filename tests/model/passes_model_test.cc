// SPDX-License-Identifier: Apache-2.0
// Properties of every pass of every model: it allocates nothing, and with batch_invariant the bits
// of a row depend on its own tokens only.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "model_driver.h"
#include "support/count_allocations.h"
#include "support/expect_error.h"
#include "support/reference_file.h"

namespace fovea {
namespace {

class Passes : public testing::TestWithParam<std::string> {
 protected:
  Passes() : file_(reference_file(GetParam())) {}

  std::vector<int32_t> prompt(int index) const {
    return values_of<int32_t>(file_, "prompt_" + std::to_string(index) + ".input_ids");
  }

  SafetensorsFile file_;
};

TEST_P(Passes, AllocateNothing) {
  ThreadPool threads(2);
  static int64_t in_passes;
  in_passes = 0;
  const DriverOptions options{.around_pass = [](bool begins) {
    in_passes += begins ? -test::allocations : int64_t{test::allocations};
  }};
  ModelDriver driver(model_folder(GetParam()), options, threads);
  const std::vector<int32_t> a = prompt(2), b = prompt(3);
  const int32_t first = driver.open(), second = driver.open();
  driver.run(std::vector<ModelDriver::Work>{{first, a}, {second, b}}, true);
  driver.run(std::vector<ModelDriver::Work>{{first, std::span(b).first(1)}}, false);
  driver.run(std::vector<ModelDriver::Work>{{first, std::span(b).first(9)},
                                            {second, std::span(a).first(1)}},
             false);
  EXPECT_EQ(in_passes, 0);
}

TEST_P(Passes, RowsDependOnTheirOwnTokensOnly) {
  const DriverOptions options{.batch_invariant = true};
  ThreadPool two(2), one(1);
  const std::vector<int32_t> tokens = prompt(2), other = prompt(3);
  const auto vocabulary = [](const ModelDriver& driver) {
    return static_cast<size_t>(driver.info().vocabulary);
  };

  ModelDriver alone(model_folder(GetParam()), options, two);
  const std::span<const float> view =
      alone.run(std::vector<ModelDriver::Work>{{alone.open(), tokens}}, true);
  const std::vector<float> whole(view.begin(), view.end());

  ModelDriver mixed(model_folder(GetParam()), options, one);
  const int32_t request = mixed.open(), companion = mixed.open();
  for (size_t begin = 0; begin < tokens.size();) {
    const size_t count = std::min<size_t>(begin == 0 ? 77 : begin % 3 + 1, tokens.size() - begin);
    const std::vector<ModelDriver::Work> work = {
        {companion, std::span(other).subspan(begin, begin % 2 + 1)},
        {request, std::span(tokens).subspan(begin, count)}};
    const std::span<const float> logits = mixed.run(work, true).last(count * vocabulary(mixed));
    const auto want =
        std::span<const float>(whole).subspan(begin * vocabulary(mixed), logits.size());
    ASSERT_TRUE(std::equal(logits.begin(), logits.end(), want.begin())) << "tokens from " << begin;
    begin += count;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Passes,
                         testing::Values("llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3",
                                         "llama4_text", "qwen3_next"),
                         [](const auto& test) { return test.param; });
INSTANTIATE_TEST_SUITE_P(Goldens, Passes, testing::ValuesIn(golden_models()),
                         [](const auto& test) { return test.param; });

struct BadInputs {
  std::vector<int32_t> tokens, positions, logit_rows;
  size_t logits = 0;
  std::string message;
};

TEST(Inputs, OutsideTheirLimitsAreRefused) {
  ThreadPool threads(1);
  const std::unique_ptr<Model> model = load_model(model_folder("llama"), threads);
  AttentionBackend* const none = nullptr;  // refused before any backend is called
  const BadInputs cases[] = {
      {{1, 2, 3, 4, 5}, {0, 1, 2, 3, 4}, {}, 0, "tokens holds 5, reserved are 4"},
      {{1, 2}, {0}, {}, 0, "positions holds 1, must hold 2"},
      {{1, 2}, {0, 8192}, {}, 0, "positions holds 8192, must be in [0, 8192)"},
      {{1, 2}, {-1, 0}, {}, 0, "positions holds -1"},
      {{1, 2}, {0, 1}, {2}, 2048, "logit_rows holds 2, must be in [0, 2)"},
      {{1, 2}, {0, 1}, {1}, 2047, "logits holds 2047 floats, must hold 1 rows of 2048"},
      {{1, 2048}, {0, 1}, {}, 0, "2048"},
      {{1, -1}, {0, 1}, {}, 0, "-1"},
  };
  model->reserve(4, 8192);
  for (const BadInputs& bad : cases) {
    std::vector<float> logits(bad.logits);
    test::expect_invalid(bad.message, [&] {
      model->forward({bad.tokens, bad.positions, bad.logit_rows}, {&none, 1}, logits);
    });
  }
}

}  // namespace
}  // namespace fovea
