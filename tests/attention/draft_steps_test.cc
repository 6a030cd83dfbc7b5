// SPDX-License-Identifier: Apache-2.0
// Steps of a draft with several branches, planned before the first one runs: the steps of all
// requests are the requests of one describe(), in which the nodes of later steps are unused. Keys
// are 0, so that a result is the mean of the values that a node sees: those of its own path.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <vector>

#include "fovea/select_backend.h"
#include "fovea/speculation.h"

namespace fovea {
namespace {

constexpr int32_t kRequests = 2, kBranches = 3, kSteps = 4, kWidth = 1 + kBranches * kSteps;
constexpr int32_t kNodes = kRequests * kWidth, kDim = 8, kPage = 4, kStride = 32;
constexpr int32_t kLens[] = {9, 6};

// Node 0 is the root; node 1 + t * kBranches + b of step t follows an earlier one.
int32_t parent_of(int32_t node) {
  if (node <= kBranches) return node - 1 < 0 ? -1 : 0;
  return node - kBranches - (node % 2);  // branches meet and end
}

float value_of(int32_t request, int32_t token) {
  return static_cast<float>(100 * request + token * token % 37);
}

class DraftSteps : public ::testing::Test {
 protected:
  DraftSteps() {
    spec_ = {.q_heads = 1, .kv_heads = 1, .head_dim = kDim, .head_dim_v = kDim};
    spec_.mask = MaskKind::tree;
    pool_ = make_kv_pool(
        {.layers = 1, .kv_heads = 1, .head_dim = kDim, .head_dim_v = kDim, .page_size = kPage}, 20);
    table_.resize(kRequests * kStride);
    for (int32_t i = 0; i < kRequests * kStride; ++i) table_[static_cast<size_t>(i)] = kPage + i;
    for (int32_t request = 0; request < kRequests; ++request) {
      const KvLayerView view = pool_->layer(0);
      for (int32_t token = 0; token < kLens[request]; ++token) {
        auto* const row =
            reinterpret_cast<float*>(v_address(view, kPage + request * kStride + token, 0));
        std::fill_n(row, kDim, value_of(request, token));
      }
    }
  }

  std::unique_ptr<AttentionBackend> make_backend() {
    auto backend =
        registry_.find("cpu")->create({.spec = spec_, .kv = pool_.get(), .threads = &threads_});
    backend->reserve({.max_requests = kRequests,
                      .max_tokens = kNodes,
                      .max_q_len = kWidth,
                      .max_kv_len = kStride});
    return backend;
  }

  AttentionSpec spec_;
  ThreadPool threads_{1};
  const BackendRegistry registry_ = BackendRegistry::builtin();
  std::unique_ptr<KvPool> pool_;
  std::vector<int32_t> table_;
};

TEST_F(DraftSteps, AreDescribedAtOnceAndPlannedBeforeTheFirst) {
  constexpr size_t kAll = static_cast<size_t>(kSteps + 1) * kNodes;
  std::vector<int32_t> parents(kAll), lens, rows;
  for (int32_t step = 0; step <= kSteps; ++step) {
    for (int32_t i = 0; i < kNodes; ++i) {
      const int32_t node = i % kWidth;
      const bool known = node <= step * kBranches;
      parents[static_cast<size_t>(step * kNodes + i)] = known ? parent_of(node) : -1;
    }
    lens.insert(lens.end(), std::begin(kLens), std::end(kLens));
    for (int32_t request = 0; request < kRequests; ++request) rows.push_back(request);
  }
  const auto requests = static_cast<int32_t>(lens.size());
  std::vector<uint64_t> ancestors(kAll);
  std::vector<int32_t> positions(kAll), q_indptr(lens.size() + 1), kv_lens(lens.size());
  std::vector<int64_t> slots(kAll);
  const auto speculation = make_speculation({requests, kWidth}, {}, {}, &threads_);
  const DraftPlaces places{{.entries = table_.data(), .stride = kStride, .rows = kRequests}, rows};
  speculation->describe({requests, kWidth, {}, parents, lens}, places,
                        {.ancestors = ancestors,
                         .positions = positions,
                         .out_slots = slots,
                         .q_indptr = q_indptr,
                         .kv_lens = kv_lens});

  std::vector<std::unique_ptr<AttentionBackend>> backends;
  for (size_t step = 0; step <= kSteps; ++step) {
    const auto part = [&](auto& array, size_t each) {
      return std::span(array).subspan(step * each, each);
    };
    const Drafts drafts{kRequests, kWidth, {}, part(parents, kNodes), part(lens, kRequests)};
    const DraftPlaces own{places.table, part(rows, kRequests)};
    backends.push_back(make_backend());
    backends.back()->plan(draft_batch(drafts, own,
                                      {.ancestors = part(ancestors, kNodes),
                                       .positions = part(positions, kNodes),
                                       .out_slots = part(slots, kNodes),
                                       .q_indptr = q_indptr,  // equal for all steps
                                       .kv_lens = part(kv_lens, kRequests)}));
  }
  std::vector<float> zeros(size_t{kNodes} * kDim), values(zeros.size()), means(zeros.size());
  for (int32_t step = 0; step <= kSteps; ++step) {
    const auto row_of = [&](int32_t request, int32_t node) {
      return static_cast<size_t>((request * kWidth + node) * kDim);
    };
    for (int32_t request = 0; request < kRequests; ++request) {
      for (int32_t node = 0; node < kWidth; ++node) {
        const bool known = node <= step * kBranches;
        std::fill_n(values.begin() + static_cast<int64_t>(row_of(request, node)), kDim,
                    known ? value_of(request, kLens[request] + node) : 1e6f);
      }
    }
    LayerTensors tensors;
    tensors.q = tensors.k = dense_rows(zeros.data(), DType::f32, 1, kDim);
    tensors.v = dense_rows(values.data(), DType::f32, 1, kDim);
    tensors.out = dense_rows(means.data(), DType::f32, 1, kDim);
    backends[static_cast<size_t>(step)]->forward(tensors);
    for (int32_t request = 0; request < kRequests; ++request) {
      for (int32_t node = 0; node <= step * kBranches; ++node) {
        float sum = 0, count = 0;
        for (int32_t token = 0; token < kLens[request]; ++token, ++count) {
          sum += value_of(request, token);
        }
        for (int32_t at = node; at >= 0; at = parent_of(at), ++count) {
          sum += value_of(request, kLens[request] + at);
        }
        EXPECT_NEAR(means[row_of(request, node)], sum / count, 1e-3)
            << "step " << step << ", node " << node << " of request " << request;
      }
    }
  }
}

}  // namespace
}  // namespace fovea
