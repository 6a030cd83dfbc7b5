// SPDX-License-Identifier: Apache-2.0
// The bytes by which rank 0 tells other processes options and requests.
#include "engine/rank_messages.h"

#include <gtest/gtest.h>

#include <utility>

#include "support/expect_error.h"

namespace fovea {
namespace {

TEST(RankMessages, RequestsArriveAsTheyWere) {
  GenerateRequest request;
  request.prompt = "prompt";
  request.tokens = {1, 2, 3};
  request.salt = "salt";
  request.sampling.temperature = 0.5f;
  request.sampling.seed = 7;
  request.sampling.logit_bias = {{4, -1.5f}};
  request.sampling.stop = {"a", "", "bc"};
  request.sampling.json_schema = "{}";
  request.sampling.prompt_logprobs = true;
  MessageWriter writer;
  transfer_request(writer, std::as_const(request));
  GenerateRequest got;
  MessageReader reader(writer.bytes());
  transfer_request(reader, got);
  MessageWriter again;
  transfer_request(again, got);
  EXPECT_EQ(again.bytes(), writer.bytes());
  EXPECT_EQ(got.prompt, "prompt");
  EXPECT_EQ(got.tokens, request.tokens);
  EXPECT_EQ(got.salt, "salt");
  EXPECT_EQ(got.sampling.temperature, 0.5f);
  EXPECT_EQ(got.sampling.logit_bias.at(0).bias, -1.5f);
  EXPECT_EQ(got.sampling.stop, request.sampling.stop);
  EXPECT_TRUE(got.sampling.prompt_logprobs);
}

TEST(RankMessages, OptionsArriveWithoutTheRegistry) {
  const BackendRegistry registry = BackendRegistry::builtin();
  EngineOptions options;
  options.model_path = "folder";
  options.random_weights = 3;
  options.registry = &registry;
  options.backend = {Policy::require, "cpu"};
  options.decode_backend = {Policy::prefer, "reference"};
  options.kv_dtype = DType::bf16;
  options.overlap = true;
  options.speculate = "ngram";
  options.workspace_budget = 12345;
  MessageWriter writer;
  transfer_options(writer, std::as_const(options));
  EngineOptions got;
  MessageReader reader(writer.bytes());
  transfer_options(reader, got);
  EXPECT_EQ(got.model_path, "folder");
  EXPECT_EQ(got.random_weights, 3u);
  EXPECT_EQ(got.registry, nullptr);
  EXPECT_EQ(got.backend.policy, Policy::require);
  EXPECT_EQ(got.backend.name, "cpu");
  EXPECT_EQ(got.decode_backend.value().name, "reference");
  EXPECT_EQ(got.kv_dtype, DType::bf16);
  EXPECT_EQ(got.overlap, true);
  EXPECT_EQ(got.speculate, "ngram");
  EXPECT_EQ(got.workspace_budget, 12345);
}

TEST(RankMessages, ShortMessagesAreRefused) {
  MessageWriter writer;
  const GenerateRequest request{.prompt = "prompt"};
  transfer_request(writer, request);
  GenerateRequest got;
  MessageReader reader({writer.bytes().data(), writer.bytes().size() - 1});
  test::expect_error(ErrorCode::device_failure, "a message of rank 0 is too short",
                     [&] { transfer_request(reader, got); });
}

}  // namespace
}  // namespace fovea
