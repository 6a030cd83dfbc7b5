// SPDX-License-Identifier: Apache-2.0
// Errors of specs and states of layers whose convolution is a call of its own, by field.
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "attention/validate/spec.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

using test::expect_invalid;

constexpr AttentionSpec kScan{
    .kind = AttentionKind::mamba1,
    .linear = {.key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 1, .conv_width = 4}};
constexpr AttentionSpec kConvolution{.kind = AttentionKind::short_conv,
                                     .linear = {.value_heads = 4, .value_dim = 2, .conv_width = 3}};

using Wrong = std::pair<const char*, std::function<void(LinearSpec&)>>;

void expect_refused(const AttentionSpec& good, std::initializer_list<Wrong> table) {
  EXPECT_NO_THROW(validate_spec(good));
  for (const auto& [words, cause] : table) {
    AttentionSpec bad = good;
    cause(bad.linear);
    expect_invalid(words, [&] { validate_spec(bad); });
  }
}

TEST(ValidateScan, NamesTheFieldOfASpec) {
  expect_refused(kScan, {{"linear.value_dim is 2, kind mamba1 has 1: its heads are channels",
                          [](auto& l) { l.value_dim = 2; }},
                         {"linear.key_dim is 0", [](auto& l) { l.key_dim = 0; }},
                         {"linear.value_heads is 3, must be a multiple of linear.key_heads 2",
                          [](auto& l) { l.value_heads = 3; }}});
  expect_refused(
      kConvolution,
      {{"linear.key_heads is 1, must be 0 for kind short_conv", [](auto& l) { l.key_heads = 1; }},
       {"linear.key_dim is 1, must be 0 for kind short_conv", [](auto& l) { l.key_dim = 1; }},
       {"linear.conv_width is 1, kind short_conv needs 2 or more",
        [](auto& l) { l.conv_width = 1; }},
       {"linear.value_heads is 0", [](auto& l) { l.value_heads = 0; }}});
}

TEST(ValidateScan, NamesTheFieldOfAState) {
  StateCacheSpec scan{.conv_dim = 4, .conv_width = 4, .heads = 4, .rows = 1, .columns = 8};
  EXPECT_NO_THROW(validate_state(kScan, scan));
  StateCacheSpec drafts = scan;
  drafts.max_drafts = drafts.draft_inputs = 4;
  expect_invalid("state max_drafts is 4, kind mamba1 keeps no drafts: use linear.snapshot_slots",
                 [&] { validate_state(kScan, drafts); });
  scan.conv_dim = kScan.linear.conv_dim();
  expect_invalid("state conv_dim is 36, the layers have 4", [&] { validate_state(kScan, scan); });

  StateCacheSpec windows{.conv_dim = 8, .conv_width = 3};
  EXPECT_NO_THROW(validate_state(kConvolution, windows));
  StateCacheSpec kept = windows;
  kept.max_drafts = 4;
  expect_invalid("state draft_inputs is 0, draft_row() of the layers has size 8",
                 [&] { validate_state(kConvolution, kept); });
  kept.draft_inputs = 8;
  EXPECT_NO_THROW(validate_state(kConvolution, kept));
  windows.columns = 8;
  expect_invalid("state columns is 8, the layers have key_dim 0",
                 [&] { validate_state(kConvolution, windows); });
  windows.heads = 4;
  expect_invalid("state heads is 4 and rows 0, both are 0 for kind short_conv",
                 [&] { validate_state(kConvolution, windows); });
}

}  // namespace
}  // namespace fovea
