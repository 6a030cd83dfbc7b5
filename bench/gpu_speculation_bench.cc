// SPDX-License-Identifier: Apache-2.0
// Times the transaction of drafts around a pass: accept() and commit() of four nodes a request, of
// which some must move, over pools of models' shapes; and acceptance by probabilities. Slots rotate
// over sets, so that rows come from memory.
#include <fmt/core.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "bench/gpu_timing.h"
#include "fovea/error.h"
#include "fovea/gpu.h"
#include "fovea/speculation.h"
#include "gpu/gpu.h"

namespace fovea::bench {
namespace {

constexpr int32_t kWidth = 8, kAccepted = 4, kSets = 8, kPageSize = 64, kLength = 20;
constexpr Device kGpu = {DeviceKind::cuda, 0};

struct PoolShape {
  const char* name;
  KvCacheSpec cache;
};

std::vector<PoolShape> pool_shapes() {
  return {{"36 layers of 8 heads of 128",
           {.dtype = DType::bf16,
            .layers = 36,
            .kv_heads = 8,
            .head_dim = 128,
            .head_dim_v = 128,
            .page_size = kPageSize}},
          {"61 layers of latents of 576",
           {.layout = KvLayout::mla,
            .dtype = DType::bf16,
            .layers = 61,
            .kv_heads = 1,
            .head_dim = 576,
            .head_dim_v = 512,
            .page_size = kPageSize}}};
}

template <typename T>
gpu::DeviceBuffer repeated(const std::vector<T>& values, int32_t times) {
  std::vector<T> all;
  for (int32_t i = 0; i < times; ++i) all.insert(all.end(), values.begin(), values.end());
  return gpu::to_device(all, nullptr);
}

// Trees of one shape whose accepted path has `moved` nodes out of their places.
class Step {
 public:
  Step(Speculation& speculation, int32_t requests, int32_t moved)
      : speculation_(speculation), requests_(requests) {
    std::vector<int32_t> path(kAccepted), parents(kWidth, -1), tokens(kWidth), target(kWidth, -2);
    std::iota(path.begin(), path.end(), 0);
    std::iota(tokens.begin(), tokens.end(), 0);
    for (int32_t i = kAccepted - moved; i < kAccepted; ++i) path[i] += kWidth - kAccepted;
    for (int32_t i = 1; i < kAccepted; ++i) {
      parents[path[i]] = path[i - 1];
      target[path[i - 1]] = path[i];
    }
    tokens_ = repeated(tokens, requests);
    parents_ = repeated(parents, requests);
    target_ = repeated(target, requests);
    lens_ = repeated<int32_t>({kLength}, requests);
    kv_lens_ = repeated<int32_t>({kLength + kWidth}, requests);
    counts_ = repeated<int32_t>({0}, requests);
    nodes_ = repeated<int32_t>({0}, requests * kWidth);
    bonus_ = repeated<int32_t>({0}, requests);
    for (int32_t set = 0; set < kSets; ++set) {
      std::vector<int64_t> slots;
      for (int64_t page = int64_t{set} * requests + 1; page <= int64_t{set + 1} * requests;
           ++page) {
        for (int32_t node = 0; node < kWidth; ++node) {
          slots.push_back(page * kPageSize + kLength + node);
        }
      }
      slots_.push_back(gpu::to_device(slots, nullptr));
    }
  }

  void run(int32_t turn, Stream stream) const {
    const Drafts drafts{requests_, kWidth, tokens_.span<const int32_t>(),
                        parents_.span<const int32_t>(), lens_.span<const int32_t>()};
    const AcceptedDrafts accepted{.counts = counts_.span<int32_t>(),
                                  .nodes = nodes_.span<int32_t>(),
                                  .bonus = bonus_.span<int32_t>()};
    const auto& slots = slots_[static_cast<size_t>(turn % kSets)];
    speculation_.accept(drafts, TargetTokens{target_.span<const int32_t>()}, accepted, stream);
    speculation_.commit(drafts,
                        {.out_slots = slots.span<int64_t>(), .kv_lens = kv_lens_.span<int32_t>()},
                        accepted, {.lens = lens_.span<int32_t>()}, stream);
  }
  bool is_right() const {
    std::vector<int32_t> lens(static_cast<size_t>(requests_));
    gpu::copy_to_host(lens.data(), lens_.data(), lens_.bytes(), nullptr);
    gpu::synchronize(nullptr);
    return std::ranges::all_of(lens, [](int32_t len) { return len == kLength + kAccepted; });
  }

 private:
  Speculation& speculation_;
  int32_t requests_;
  gpu::DeviceBuffer tokens_, parents_, target_, lens_, kv_lens_, counts_, nodes_, bonus_;
  std::vector<gpu::DeviceBuffer> slots_;
};

void time_commits(Stream stream) {
  fmt::print("| pool | requests | rows moved | MB | accept and commit, us |\n");
  for (const PoolShape& shape : pool_shapes()) {
    for (const int32_t requests : {1, 8, 64}) {
      const auto pool = make_kv_pool(shape.cache, int64_t{kSets} * requests + 1, kGpu);
      KvPool* const pools[] = {pool.get()};
      const auto speculation = make_speculation({requests, kWidth}, pools, kGpu, nullptr);
      for (int32_t moved = 0; moved < kAccepted; ++moved) {
        const Step step(*speculation, requests, moved);
        const double us = graph_seconds([&](int32_t turn, Stream s) { step.run(turn, s); }, stream);
        const double row = static_cast<double>(shape.cache.bytes_per_page()) / kPageSize;
        fmt::print("| {} | {} | {} | {:.2f} | {:.2f}{} |\n", shape.name, requests, moved,
                   2 * moved * requests * row * 1e-6, us * 1e6, step.is_right() ? "" : " WRONG");
      }
    }
  }
}

// Acceptance of three drafts that disagree with the model: one rejection, then a draw.
void time_sampling(Stream stream) {
  constexpr int32_t kVocabulary = 151936, kDrafts = 4;
  fmt::print("| requests | vocabulary | drafts | accept, us |\n");
  std::mt19937 random(1);
  std::vector<float> row(kVocabulary);
  for (float& p : row) p = static_cast<float>(random() % 1000 + 1);
  const double sum = std::accumulate(row.begin(), row.end(), 0.0);
  for (float& p : row) p = static_cast<float>(p / sum);
  const std::vector<float> reversed(row.rbegin(), row.rend());
  for (const int32_t requests : {1, 8, 64}) {
    const gpu::DeviceBuffer target = repeated(row, requests * kDrafts),
                            draft = repeated(reversed, requests * kDrafts),
                            tokens = repeated<int32_t>({1, 2, 3, 4}, requests),
                            lens = repeated<int32_t>({kLength}, requests),
                            seeds = repeated<uint64_t>({7}, requests),
                            bonus = repeated<int32_t>({0}, requests);
    const auto speculation = make_speculation({requests, kDrafts}, {}, kGpu, nullptr);
    const Drafts drafts{.requests = requests,
                        .width = kDrafts,
                        .tokens = tokens.span<const int32_t>(),
                        .lens = lens.span<const int32_t>()};
    for (const bool drawn : {true, false}) {
      TargetProbabilities probabilities{.vocabulary = kVocabulary,
                                        .row_stride = kVocabulary,
                                        .target = target.span<const float>(),
                                        .seeds = seeds.span<const uint64_t>()};
      if (drawn) probabilities.draft = draft.span<const float>();
      const double us = graph_seconds(
          [&](int32_t, Stream s) {
            speculation->accept(drafts, probabilities, {.bonus = bonus.span<int32_t>()}, s);
          },
          stream);
      fmt::print("| {} | {} | {} | {:.1f} |\n", requests, kVocabulary, drawn ? "drawn" : "chosen",
                 us * 1e6);
    }
  }
}

void run_all() {
  const gpu::Context context(0);
  context.bind();
  const gpu::OwnedStream stream;
  time_commits(stream.get());
  time_sampling(stream.get());
}

}  // namespace
}  // namespace fovea::bench

int main() {
  try {
    fovea::bench::run_all();
  } catch (const fovea::Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
