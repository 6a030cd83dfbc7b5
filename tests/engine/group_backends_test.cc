// SPDX-License-Identifier: Apache-2.0
// The backends that the engine selects for the layer groups of a model. Selection does not use a
// device, so a GPU's backends are tested without one.
#include "engine/group_backends.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "engine/small_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

BackendEntry accepting(const std::string& name, GraphSupport graphs) {
  BackendEntry entry;
  entry.name = name;
  entry.graphs = graphs;
  entry.reject = [](const BackendRequest&) { return std::vector<Reason>(); };
  entry.workspace_bytes = [](const BackendRequest&) { return size_t{0}; };
  entry.create = [](const BackendContext&) { return std::unique_ptr<AttentionBackend>(); };
  return entry;
}

class GroupBackends : public testing::Test {
 protected:
  GroupBackends() {
    BackendEntry refusing = accepting("refused", GraphSupport::always);
    refusing.reject = [](const BackendRequest&) {
      return std::vector<Reason>{{RejectCode::not_built, "a test"}};
    };
    registry_.add(std::move(refusing));
    registry_.add(accepting("replayed", GraphSupport::always));
    registry_.add(accepting("replayed_decodes", GraphSupport::always));
    registry_.add(accepting("enqueued", GraphSupport::never));
    options_.registry = &registry_;
    options_.kv_dtype = DType::bf16;
    LayerGroup group;
    group.spec = {.q_heads = 4, .kv_heads = 2, .head_dim = 64, .head_dim_v = 64};
    group.spec.q_dtype = DType::bf16;
    group.layers = {0, 1};
    model_.groups = {group};
  }

  GroupSelection select(const std::string& backend, const std::string& decode_backend,
                        DeviceKind device) {
    options_.backend = parse_backend_wish(backend);
    options_.decode_backend = parse_backend_wish(decode_backend);
    return select_group_backends(model_, cache_groups(model_, options_), options_, {},
                                 {.kind = device, .sm = 90})
        .front();
  }

  BackendRegistry registry_;
  EngineOptions options_;
  ModelInfo model_;
};

TEST_F(GroupBackends, DecodeStepsAreCapturedWhereTheirBackendAllowsIt) {
  EXPECT_EQ(select("enqueued", "replayed", DeviceKind::cuda).why_no_graphs, "");
  EXPECT_EQ(select("replayed", "replayed_decodes", DeviceKind::cuda).why_no_graphs, "");
  const GroupSelection refused = select("replayed", "enqueued", DeviceKind::cuda);
  EXPECT_NE(refused.why_no_graphs.find("enqueued captures no batch"), std::string::npos);
  EXPECT_TRUE(explain(refused).starts_with("layers 0, 1; " + refused.why_no_graphs));
  EXPECT_EQ(select("replayed", "enqueued", DeviceKind::cpu).why_no_graphs, "");
  options_.cuda_graphs = false;
  EXPECT_EQ(select("replayed", "enqueued", DeviceKind::cuda).why_no_graphs, "");
}

TEST_F(GroupBackends, APreferredDecodeBackendThatCannotServeIsReported) {
  const GroupSelection same = select("replayed", "prefer:refused", DeviceKind::cuda);
  ASSERT_TRUE(same.decode);
  EXPECT_NE(same.decode->fallback.find("instead of the preferred refused: a test"),
            std::string::npos);
}

TEST_F(GroupBackends, InvariantBatchesNeedOneBackend) {
  options_.batch_invariant = true;
  EXPECT_NO_THROW(select("replayed", "replayed", DeviceKind::cuda));
  test::expect_invalid("backend is replayed, decode_backend is enqueued",
                       [&] { select("replayed", "enqueued", DeviceKind::cuda); });
}

// Their states share one pool.
TEST_F(GroupBackends, TwoGroupsOfLinearLayersAreRefused) {
  model_.architecture = "TwiceLinear";
  LayerGroup linear;
  linear.spec.kind = AttentionKind::mamba2;
  model_.groups.push_back(linear);
  EXPECT_TRUE(cache_groups(model_, options_).back().state);
  model_.groups.push_back(linear);
  test::expect_error(ErrorCode::unsupported, "TwiceLinear has 2 groups of linear layers, at most 1",
                     [&] { (void)cache_groups(model_, options_); });
}

}  // namespace
}  // namespace fovea
