// SPDX-License-Identifier: Apache-2.0
// Routing to experts, and their products, on a GPU against the CPU.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "gpu/model_devices.h"

namespace fovea {
namespace {

struct Routing {
  kernels::MoeScore score;
  int32_t experts, top_k, groups = 1, top_groups = 1;
  bool normalise = false;
  int32_t first_own = 0, own = kernels::kMaxExperts;  // experts of the rank
};
const Routing kRoutings[] = {{kernels::MoeScore::softmax, 60, 4, 1, 1, true},
                             {kernels::MoeScore::topk_softmax, 4, 2},
                             {kernels::MoeScore::sigmoid, 16, 1},
                             {kernels::MoeScore::grouped_sigmoid, 64, 6, 8, 3, true},
                             {kernels::MoeScore::grouped_softmax, 64, 6, 8, 3},
                             {kernels::MoeScore::softmax, 60, 4, 1, 1, true, 0, 23},
                             {kernels::MoeScore::topk_softmax, 32, 4, 1, 1, false, 16, 16}};

TEST_F(ModelDevices, RouteAlike) {
  constexpr int32_t kRows = 40;
  for (const Routing& routing : kRoutings) {
    std::vector<float> logits = random(static_cast<size_t>(kRows) * routing.experts);
    logits[3] = logits[2] = logits[1];  // equal scores: the lower expert goes first
    const std::vector<float> bias = random(routing.experts, 0.1f);
    const auto choices = static_cast<size_t>(kRows) * routing.top_k;
    std::vector<int32_t> ids[2];
    expect_same(
        DType::f32, routing.top_k,
        [&](Side& side) {
          kernels::MoeRoutingParams params;
          params.score = routing.score;
          params.logits = side.floats(logits, routing.experts).floats();
          params.rows = kRows;
          params.experts = routing.experts;
          params.top_k = routing.top_k;
          params.normalise = routing.normalise;
          params.sum_epsilon = 0.25f;
          params.factor = 2.5f;
          params.bias = side->place(bias).data();
          params.groups = routing.groups;
          params.top_groups = routing.top_groups;
          params.first_own = routing.first_own;
          params.own = routing.own;
          params.ids = side.ints(std::vector<int32_t>(choices));
          params.weights = side.floats(std::vector<float>(choices), routing.top_k).floats();
          side->moe_routing(params);
          ids[side->kind() == DeviceKind::cuda] = side.read<int32_t>(params.ids, choices);
          return side.read<float>(params.weights, choices);
        },
        "score " + std::to_string(static_cast<int>(routing.score)));
    EXPECT_EQ(ids[0], ids[1]);
  }
}

TEST_F(ModelDevices, RunExpertsAlike) {
  constexpr int32_t kExperts = 5;
  for (int which = 0; which < 10; ++which) {
    // The last four have few rows, whose products are other kernels' on Hopper.
    const bool few = which >= 6;
    const bool is_kn = which % 2 == 0, alternates = which == 2 || which == 8;
    const bool separate = which == 3 || which == 9, scales_input = which == 4 || which == 7;
    const bool adds = which % 4 != 1;
    const int32_t hidden = few ? 160 : 136, width = few ? 96 : 72;
    const int32_t rows = few ? 5 : which == 5 ? 200 : 19, top_k = scales_input ? 1 : 2;
    std::vector<std::vector<float>> gate, up, down, gate_bias, down_bias;
    for (int32_t e = 0; e < kExperts; ++e) {
      const int32_t gate_width = separate ? width : 2 * width;
      gate.push_back(random(static_cast<size_t>(gate_width) * hidden, 0.1f));
      up.push_back(random(static_cast<size_t>(width) * hidden, 0.1f));
      down.push_back(random(static_cast<size_t>(hidden) * width, 0.1f));
      gate_bias.push_back(alternates ? random(gate_width) : std::vector<float>());
      down_bias.push_back(alternates ? random(hidden) : std::vector<float>());
    }
    const std::vector<float> x = random(static_cast<size_t>(rows) * hidden);
    const std::vector<float> before = random(x.size());
    const std::vector<float> weights = random(static_cast<size_t>(rows) * top_k);
    std::vector<int32_t> ids;
    for (int32_t row = 0; row < rows; ++row) {
      // Expert 1 gets no rows: an empty expert must work.
      const int32_t first = random_ints(1, kExperts)[0];
      ids.push_back(first == 1 ? 2 : first);
      if (top_k == 2) ids.push_back(ids.back() == 4 ? 0 : 4);
    }
    // Every third case is that of a rank that lacks expert 4; in one of them it has no expert at
    // all.
    for (int32_t& id : ids) {
      if (which % 3 == 0 && (id == 4 || which == 9)) id = -1;
    }
    expect_same(
        test::kExpertsBudget, hidden,
        [&](Side& side) {
          std::vector<MlpParts> experts;
          for (size_t e = 0; e < kExperts; ++e) {
            MlpParts& parts = experts.emplace_back();
            parts.gate =
                side.linear(gate[e], separate ? width : 2 * width, hidden, is_kn, gate_bias[e]);
            if (separate) parts.up = side.linear(up[e], width, hidden, is_kn);
            parts.down = side.linear(down[e], hidden, width, is_kn, down_bias[e]);
            parts.alternates = alternates;
            if (alternates) parts.activation = kernels::Activation::clamped_swiglu;
          }
          const std::unique_ptr<Experts> placed = side->place(std::move(experts), scales_input);
          const size_t bytes = placed->scratch_bytes(rows, top_k);
          const std::shared_ptr<std::byte> scratch = side->allocate(bytes);
          const Rows out = side.floats(before, hidden);
          placed->run({side.ints(ids), side.floats(weights, top_k).floats(), top_k},
                      side.activations(x, hidden), out, rows, adds, scratch.get());
          return side.read(out, x.size());
        },
        "experts " + std::to_string(which));
  }
}

}  // namespace
}  // namespace fovea
