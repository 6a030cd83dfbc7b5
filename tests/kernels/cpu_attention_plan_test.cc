// SPDX-License-Identifier: Apache-2.0
// How the CPU attention cuts a batch into items.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/attention.h"
#include "kernels/cpu/simd/attention/work.h"
#include "support/poison.h"

namespace fovea {
namespace {

using kernels::cpu::AttentionItem;
using kernels::cpu::AttentionMerge;
using kernels::cpu::AttentionSchedule;
using kernels::cpu::AttentionShape;
using kernels::cpu::Isa;

struct Lengths {
  int32_t q_len, kv_len;
};

// A batch, its plan in a workspace of exactly the required size, and the contents of the plan.
class Planned {
 public:
  Planned(const AttentionShape& shape, const std::vector<Lengths>& requests)
      : shape_(shape), q_indptr_(1, 0) {
    BatchLimits limits = {static_cast<int32_t>(requests.size()), 0, 0, 0, 0};
    for (const auto [q_len, kv_len] : requests) {
      q_indptr_.push_back(q_indptr_.back() + q_len);
      kv_lens_.push_back(kv_len);
      limits.max_tokens += q_len;
      limits.max_q_len = std::max(limits.max_q_len, q_len);
      limits.max_kv_len = std::max(limits.max_kv_len, kv_len);
    }
    params_.requests = limits.max_requests;
    params_.q_indptr = q_indptr_.data();
    params_.kv_lens = kv_lens_.data();
    params_.q_heads = shape.q_heads;
    params_.kv_heads = shape.kv_heads;
    params_.head_dim = shape.head_dim;
    params_.head_dim_v = shape.head_dim_v;
    bytes_.resize(attention_workspace_bytes(shape, limits) / sizeof(Line));
    schedule_ = plan_attention(shape, params_, std::as_writable_bytes(std::span(bytes_)));
  }

  const AttentionSchedule& schedule() const { return schedule_; }

  // Checks that the items cover rows x heads x keys of the batch once, except for those that are
  // hidden completely.
  void expect_everything_once() const {
    std::map<std::pair<int32_t, int32_t>, int64_t> seen;  // (request, head) -> row-keys
    for (const AttentionItem& item : schedule_.items) {
      for (int32_t head = item.head_begin; head < item.head_end; ++head) {
        seen[{item.request, head}] +=
            int64_t{item.row_end - item.row_begin} * (item.kv_end - item.kv_begin);
        for (const AttentionItem& other : schedule_.items) {
          const bool apart = &other == &item || other.request != item.request ||
                             head < other.head_begin || head >= other.head_end ||
                             item.row_end <= other.row_begin || other.row_end <= item.row_begin ||
                             item.kv_end <= other.kv_begin || other.kv_end <= item.kv_begin;
          ASSERT_TRUE(apart) << "head " << head << ", keys " << item.kv_begin << ", "
                             << other.kv_begin;
        }
      }
    }
    // A decode: every key is visible.
    for (int32_t request = 0; request < params_.requests; ++request) {
      if (q_indptr_[request + 1] - q_indptr_[request] != 1) continue;
      const auto kv_len = kv_lens_[static_cast<size_t>(request)];
      const int64_t want = int64_t{shape_.q_heads / shape_.kv_heads} * kv_len;
      for (int32_t head = 0; head < shape_.kv_heads; ++head) {
        const auto found = seen.find({request, head});
        ASSERT_EQ(found == seen.end() ? 0 : found->second, want)
            << "request " << request << ", head " << head;
      }
    }
  }

  // Checks that one item writes each part of each piece of a merge, within the memory for partials.
  void expect_merges_are_whole() const {
    const int64_t floats = (schedule_.scratch - reinterpret_cast<std::byte*>(schedule_.partials)) /
                           static_cast<int64_t>(sizeof(float));
    for (const AttentionMerge& merge : schedule_.merges) {
      const int64_t end = merge.tile.partial + merge.pieces * merge.partial_stride;
      ASSERT_LE(end, floats);
      for (int32_t piece = 0; piece < merge.pieces; ++piece) {
        const int64_t partial = merge.tile.partial + piece * merge.partial_stride;
        for (int32_t head = merge.tile.head_begin; head < merge.tile.head_end; ++head) {
          const auto left = std::ranges::count_if(schedule_.items, [&](const AttentionItem& item) {
            return item.partial == partial && item.head_begin <= head && head < item.head_end &&
                   item.row_begin == merge.tile.row_begin &&
                   item.partial_head == merge.tile.partial_head &&
                   item.partial_heads == merge.tile.partial_heads;
          });
          ASSERT_EQ(left, 1) << "piece " << piece << ", head " << head;
        }
      }
    }
    for (const AttentionItem& item : schedule_.items) {
      const auto merges = std::ranges::count_if(schedule_.merges, [&](const AttentionMerge& merge) {
        return item.request == merge.tile.request && item.row_begin == merge.tile.row_begin &&
               item.head_begin <= merge.tile.head_begin && merge.tile.head_begin < item.head_end;
      });
      ASSERT_EQ(item.partial >= 0, merges > 0);
    }
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };

  const AttentionShape shape_;
  std::vector<int32_t> q_indptr_, kv_lens_;
  kernels::AttentionParams params_;
  std::vector<Line> bytes_;
  AttentionSchedule schedule_;
};

TEST(CpuAttentionPlan, CoversRandomBatchesOnce) {
  std::mt19937 random(1);
  const auto between = [&](int32_t least, int32_t most) {
    return std::uniform_int_distribution(least, most)(random);
  };
  for (int round = 0; round < 400; ++round) {
    const int32_t kv_heads = between(1, 9);
    const AttentionShape shape = {Isa::avx2, between(1, 9),       kv_heads * between(1, 14),
                                  kv_heads,  16 * between(1, 16), 16 * between(1, 16)};
    std::vector<Lengths> requests(static_cast<size_t>(between(0, 1) ? 1 : between(1, 5)));
    for (auto& [q_len, kv_len] : requests) {
      q_len = between(0, 3) ? 1 : between(1, 300);
      kv_len = q_len + between(0, 1 << between(1, 14));
    }
    SCOPED_TRACE(testing::Message()
                 << "round " << round << ": " << shape.threads << " threads, " << shape.q_heads
                 << "/" << kv_heads << " heads, " << requests.size() << " requests, the first of "
                 << requests[0].kv_len << " keys");
    const Planned plan(shape, requests);
    plan.expect_everything_once();
    plan.expect_merges_are_whole();
    if (HasFatalFailure()) return;
  }
}

// A page holds the keys of all heads, so an item with all heads reads the page from front to back.
TEST(CpuAttentionPlan, ASingleTokenReadsWholePagesWhereThreadsShareThemEvenly) {
  const auto items_of = [](int32_t kv_len, int32_t threads) {
    std::vector<std::string> items;
    const Planned plan({Isa::avx2, threads, 32, 8, 128, 128}, {{1, kv_len}});
    for (const AttentionItem& item : plan.schedule().items) {
      items.push_back("heads " + std::to_string(item.head_begin) + " to " +
                      std::to_string(item.head_end) + ", keys " + std::to_string(item.kv_begin) +
                      " to " + std::to_string(item.kv_end));
    }
    return items;
  };
  using Items = std::vector<std::string>;
  EXPECT_EQ(items_of(1024, 2),
            (Items{"heads 0 to 8, keys 0 to 512", "heads 0 to 8, keys 512 to 1024"}));
  EXPECT_EQ(items_of(1100, 2),
            (Items{"heads 0 to 8, keys 0 to 512", "heads 0 to 8, keys 512 to 1024",
                   "heads 0 to 4, keys 1024 to 1100", "heads 4 to 8, keys 1024 to 1100"}));
  EXPECT_EQ(items_of(1000, 2),
            (Items{"heads 0 to 4, keys 0 to 512", "heads 4 to 8, keys 0 to 512",
                   "heads 0 to 4, keys 512 to 1000", "heads 4 to 8, keys 512 to 1000"}));
}

}  // namespace
}  // namespace fovea
