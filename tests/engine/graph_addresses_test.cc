// SPDX-License-Identifier: Apache-2.0
#include "engine/graph_addresses.h"

#include <gtest/gtest.h>

#include <string>

#include "fovea/error.h"

namespace fovea {
namespace {

std::string refusal(std::span<const GraphAddress> captured, std::span<const GraphAddress> now) {
  try {
    check_addresses(captured, now, 8);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    return error.what();
  }
  return "";
}

TEST(GraphAddresses, NameTheArrayThatMoved) {
  const int here = 0, there = 0;
  const std::vector<GraphAddress> captured = {{.array = "logits", .address = &here},
                                              {.array = "the slot map", .group = 1},
                                              {"k", 1, 3, &here}};
  EXPECT_EQ(refusal(captured, captured), "");
  for (size_t moved = 0; moved < captured.size(); ++moved) {
    std::vector<GraphAddress> now = captured;
    now[moved].address = &there;
    const std::string text = refusal(captured, now);
    EXPECT_EQ(text.rfind(moved == 0   ? "logits is at"
                         : moved == 1 ? "the slot map of layer group 1 is at"
                                      : "k of layer 3 of layer group 1 is at",
                         0),
              0u)
        << text;
    EXPECT_NE(text.find("the graph for 8 requests"), std::string::npos) << text;
  }
}

TEST(GraphAddresses, NameTheArrayThatIsGone) {
  const int here = 0;
  const std::vector<GraphAddress> captured = {{.array = "logits", .address = &here},
                                              {"k", 1, 3, &here}};
  EXPECT_EQ(refusal(captured, std::span(captured).first(1)).rfind("k of layer 3", 0), 0u);
}

}  // namespace
}  // namespace fovea
