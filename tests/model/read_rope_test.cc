// SPDX-License-Identifier: Apache-2.0
// Rotary settings by layer type, which no checkpoint of testdata has, and the defaults of
// architectures.
#include "model/read_rope.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "fovea/error.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using kernels::RopeScaling;

constexpr RopeDefaults kFull = {.theta = 1e6};
constexpr RopeDefaults kSliding = {
    .theta = 1e4, .theta_field = "rope_local_base_freq", .has_rope_scaling = false};
constexpr std::string_view kFullType = "full_attention", kSlidingType = "sliding_attention";

kernels::RopeSpec read(std::string_view json, const RopeDefaults& defaults = {},
                       std::string_view layer_type = {}) {
  return read_rope(JsonObject::parse(json, "config.json"), 64, defaults, layer_type);
}

struct ByLayerType {
  const char* json;
  double full_theta, sliding_theta;
  RopeScaling full_scaling;
};

TEST(ReadRope, FollowsGemma3ByLayerType) {
  const ByLayerType cases[] = {
      {"{}", 1e6, 1e4, RopeScaling::none},
      {R"({"rope_theta": 5e5, "rope_local_base_freq": 2e4})", 5e5, 2e4, RopeScaling::none},
      {R"({"rope_scaling": {"rope_type": "linear", "factor": 8.0}})", 1e6, 1e4,
       RopeScaling::linear},
      {R"({"rope_parameters": {"full_attention": {"rope_theta": 7e5, "rope_type": "linear",
           "factor": 8.0}, "sliding_attention": {"rope_theta": 3e4}}, "rope_theta": 5e5})",
       7e5, 3e4, RopeScaling::linear},
      {R"({"rope_parameters": {"full_attention": {"rope_theta": 7e5}, "sliding_attention": null},
           "rope_scaling": {"rope_type": "linear", "factor": 8.0}})",
       7e5, 1e4, RopeScaling::linear},
  };
  for (const ByLayerType& wanted : cases) {
    SCOPED_TRACE(wanted.json);
    const kernels::RopeSpec full = read(wanted.json, kFull, kFullType);
    const kernels::RopeSpec sliding = read(wanted.json, kSliding, kSlidingType);
    EXPECT_EQ(full.theta, wanted.full_theta);
    EXPECT_EQ(sliding.theta, wanted.sliding_theta);
    EXPECT_EQ(full.scaling, wanted.full_scaling);
    EXPECT_EQ(sliding.scaling, RopeScaling::none);
    EXPECT_EQ(full.factor, wanted.full_scaling == RopeScaling::none ? 1 : 8);
  }
}

TEST(ReadRope, RefusesValuesThatBelongToNoLayerType) {
  const auto refuse = [](std::string_view json, std::string_view message) {
    test::expect_error(ErrorCode::corrupt_file, message, [&] { read(json, kFull, kFullType); });
  };
  refuse(R"({"rope_parameters": {"rope_type": "linear", "factor": 8.0}})",
         "must be inside the values of a layer type");
  refuse(R"({"rope_scaling": {"type": "linear", "factor": 8.0}})",
         "rope_scaling.type is \"linear\", must be spelled rope_type");
  refuse(R"({"rope_parameters": {"full_attention": {"rope_type": "linear"}}})",
         "rope_parameters.full_attention.factor is missing");
}

TEST(ReadRope, KnowsTheOlderNamesOfPhi3) {
  constexpr RopeDefaults kPhi3 = {
      .rotates_parts = true, .original_max_positions = 4096, .yarn_is_longrope = true};
  const std::string ones = "[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]";  // for half a head
  for (const std::string type : {"su", "yarn", "longrope"}) {
    const kernels::RopeSpec spec =
        read(R"({"partial_rotary_factor": 0.5, "max_position_embeddings": 131072,
                 "rope_scaling": {"type": ")" +
                 type + R"(", "short_factor": )" + ones + R"(, "long_factor": )" + ones + "}}",
             kPhi3);
    EXPECT_EQ(spec.scaling, RopeScaling::longrope);
    EXPECT_EQ(spec.rotary_dim, 32);
    EXPECT_EQ(spec.original_max_positions, 4096);
    EXPECT_EQ(spec.factor, 32);
  }
  test::expect_error(ErrorCode::unsupported,
                     "rope_type is 'linear'; supported are default, longrope",
                     [&] { read(R"({"rope_scaling": {"type": "linear", "factor": 2}})", kPhi3); });
}

TEST(ReadRope, TakesTheObjectOfTheArchitectureForAMissingOne) {
  constexpr RopeDefaults kDefaults = {.theta = 15e4,
                                      .parameters = R"({"rope_type": "linear", "factor": 4})"};
  EXPECT_EQ(read("{}", kDefaults).factor, 4);
  EXPECT_EQ(read(R"({"rope_parameters": null})", kDefaults).factor, 4);
  EXPECT_EQ(read(R"({"rope_parameters": {}})", kDefaults).scaling, RopeScaling::none);
  EXPECT_EQ(read(R"({"rope_theta": 7e4})", kDefaults).theta, 7e4);
}

}  // namespace
}  // namespace fovea
