// SPDX-License-Identifier: Apache-2.0
// The table of Hopper's choices on a GPU of 132 multiprocessors. A row that changes here changes
// which kernel serves a batch: measure before and after.
#include <gtest/gtest.h>

#include <array>

#include "kernels/cuda/sm90/choose.h"

namespace fovea::kernels::cuda::hopper {
namespace {

constexpr int32_t kMultiprocessors = 132;
// Clusters of decode that run at the same time on an H200.
constexpr std::array kClusters = {ClusterCapacity{2, 66}, ClusterCapacity{3, 39},
                                  ClusterCapacity{4, 30}, ClusterCapacity{6, 20},
                                  ClusterCapacity{8, 15}};

struct DecodeRow {
  const char* name;
  int32_t requests, q_len, kv_len;
  int32_t row_tile, cluster, ctas, cluster_part_units;  // chosen
  int32_t window = 0;
  bool prefix_written = true;
};

// 32 q heads over 8 kv heads of 128 columns.
constexpr DecodeRow kDecodeRows[] = {
    {"one request of 4k goes to clusters of 8", 1, 1, 4096, 8, 8, 120, 34},
    {"one request of 512 too, as its parts are short", 1, 1, 512, 8, 8, 120, 34},
    {"four requests of 1k: clusters of 2 hold half of the CTAs", 4, 1, 1024, 8, 2, 132, 34},
    {"16 requests of 4k fill the device without clusters", 16, 1, 4096, 8, 1, 132, 0},
    {"five new tokens have 20 rows: no tile holds them", 1, 5, 4096, 16, 1, 132, 0},
    {"three new tokens have 12 rows", 1, 3, 4096, 16, 8, 120, 34},
    {"a window bounds the keys", 1, 1, 1 << 20, 8, 8, 120, 34, 512},
    {"keys of this pass are waited for: half of the CTAs are too few", 1, 1, 4096, 8, 1, 132, 0, 0,
     false},
    {"unless the keys keep few CTAs busy", 1, 1, 256, 8, 8, 120, 0, 0, false},
};

TEST(HopperChoose, Decode) {
  const std::array kernels = {DecodeKernel{8, kClusters}, DecodeKernel{16, kClusters}};
  for (const DecodeRow& row : kDecodeRows) {
    AttentionSpec spec;
    spec.q_heads = 32;
    spec.kv_heads = 8;
    spec.head_dim = spec.head_dim_v = 128;
    spec.window = row.window;
    const DecodeChoice choice = choose_decode(spec, kMultiprocessors, kernels,
                                              {.requests = row.requests,
                                               .tokens = row.requests * row.q_len,
                                               .q_len = row.q_len,
                                               .kv_len = row.kv_len,
                                               .q_heads = 32,
                                               .kv_heads = 8,
                                               .prefix_written = row.prefix_written});
    EXPECT_EQ(kernels[choice.kernel].row_tile, row.row_tile) << row.name;
    EXPECT_EQ(choice.cluster, row.cluster) << row.name;
    EXPECT_EQ(choice.ctas, row.ctas) << row.name;
    EXPECT_EQ(choice.cluster_part_units, row.cluster_part_units) << row.name;
  }
}

TEST(HopperChoose, RowsThatDecodeServes) {
  EXPECT_EQ(max_decode_rows(DType::bf16, false), 32);
  EXPECT_EQ(max_decode_rows(DType::bf16, true), 8);
  EXPECT_EQ(max_decode_rows(DType::f8e4m3, true), 16);
}

struct SplitRow {
  const char* name;
  int32_t requests, q_len, kv_len;
  int32_t row_tile;  // chosen; 0: keys are not split
  bool packed_keys = false;
};

// 32 q heads over 8 kv heads.
constexpr SplitRow kSplitRows[] = {
    {"16 tokens over 16k: 8 tiles leave most of the device idle", 1, 16, 16384, 64},
    {"16 tokens over 1k: too few keys", 1, 16, 1024, 0},
    {"four tokens are 16 rows, slow in decode", 8, 4, 512, 64},
    {"64 tokens over 16k", 1, 64, 16384, 128},
    {"a prompt of 4k fills the device", 4, 4096, 4096, 0},
    {"packed keys pay earlier", 1, 16, 1536, 64, true},
};

TEST(HopperChoose, SplitKeys) {
  constexpr std::array kForms = {SplitForm{64, 0.65f}, SplitForm{128, 1.05f}};
  for (const SplitRow& row : kSplitRows) {
    const auto form =
        choose_split(kForms, row.packed_keys, max_decode_rows(DType::bf16, true), kMultiprocessors,
                     {.requests = row.requests,
                      .tokens = row.requests * row.q_len,
                      .q_len = row.q_len,
                      .kv_len = row.kv_len,
                      .q_heads = 32,
                      .kv_heads = 8});
    EXPECT_EQ(form ? kForms[*form].row_tile : 0, row.row_tile) << row.name;
  }
}

struct PrefillRow {
  const char* name;
  int32_t requests, tokens, q_len;
  PrefillForm form;  // chosen
  int32_t q_heads = 32, kv_heads = 8;
  bool positions = false;
  bool concurrent = false;
  bool sums_segments = false;
};

// Head dim 128; key tiles of 128 keys.
constexpr PrefillRow kPrefillRows[] = {
    {"prompts whose q heads share keys", 4, 16384, 4096, PrefillForm::pairs},
    {"short prompts too", 16, 1024, 64, PrefillForm::pairs},
    {"but not while decode runs", 4, 16384, 4096, PrefillForm::plain, 32, 8, false, true},
    {"positions need general scores", 1, 16, 16, PrefillForm::general, 32, 8, true},
    {"long ones in pairs", 4, 16384, 4096, PrefillForm::general_pairs, 32, 8, true},
    {"as many kv heads: short prompts alone", 16, 8192, 512, PrefillForm::plain, 32, 32},
    {"long prompts in pairs that pass key tiles", 4, 16384, 4096, PrefillForm::pairs, 32, 32},
    {"segments: one token", 8, 8, 1, PrefillForm::few_rows, 32, 8, false, false, true},
    {"segments: eight tokens", 8, 64, 8, PrefillForm::few_plain, 32, 8, false, false, true},
    {"segments: pairs for 512 tokens a request", 2, 1024, 512, PrefillForm::pairs, 32, 8, false,
     false, true},
    {"segments: else single blocks", 3, 1024, 512, PrefillForm::plain, 32, 8, false, false, true},
};

TEST(HopperChoose, Prefill) {
  for (const PrefillRow& row : kPrefillRows) {
    PrefillForms forms;
    forms.key_tiles.fill(128);
    forms.key_tiles[static_cast<size_t>(PrefillForm::few_whole)] = 0;
    forms.multiprocessors = kMultiprocessors;
    forms.heads_shift = row.q_heads == row.kv_heads ? 0 : 2;
    forms.sums_segments = row.sums_segments;
    forms.pairs_pass = row.q_heads == row.kv_heads;
    EXPECT_EQ(choose_prefill(forms,
                             {.requests = row.requests,
                              .all_requests = row.requests,
                              .tokens = row.tokens,
                              .q_len = row.q_len,
                              .kv_len = row.q_len,
                              .q_heads = row.q_heads,
                              .kv_heads = row.kv_heads,
                              .has_positions = row.positions,
                              .concurrent = row.concurrent},
                             true),
              row.form)
        << row.name;
  }
  EXPECT_EQ(describe(PrefillForm::general_pairs), "pairs of blocks");
}

TEST(HopperChoose, FewRowsShareSegments) {
  constexpr std::array kForms = {SharingForm{4, 1, 33}, SharingForm{8, 4, 15},
                                 SharingForm{2, 0, 66}};
  const auto cluster = [&](int32_t requests, int32_t kv_len) {
    const auto form =
        choose_sharing(kForms, 1024, requests * 8, {.all_requests = requests, .kv_len = kv_len});
    return form ? kForms[*form].cluster : 1;
  };
  EXPECT_EQ(cluster(1, 1000), 4);
  EXPECT_EQ(cluster(1, 4096), 8);
  EXPECT_EQ(cluster(1, 3000), 2) << "three segments, the last one nearly whole";
  EXPECT_EQ(cluster(1, 5000), 2);
  EXPECT_EQ(cluster(4, 65536), 2);
  EXPECT_EQ(cluster(8, 1000), 2);
  EXPECT_EQ(cluster(8, 5000), 1) << "more segments than clusters";
}

TEST(HopperChoose, JoinsOfLatentDecode) {
  constexpr MlaForms kForms = {.usual = MlaJoins::blocks, .pairs = false, .clusters = true};
  constexpr std::array kLatentClusters = {ClusterCapacity{8, 15}, ClusterCapacity{16, 7}};
  const auto choose = [&](const MlaForms& forms, int32_t requests, int32_t kv_len) {
    return choose_mla(forms, 16, kMultiprocessors, kLatentClusters,
                      {.requests = requests, .q_len = 1, .kv_len = kv_len, .q_heads = 16});
  };
  EXPECT_EQ(choose(kForms, 1, 4096).cluster, 8);
  EXPECT_EQ(choose(kForms, 64, 4096).joins, MlaJoins::blocks) << "more row tiles than clusters";
  constexpr MlaForms kPairs = {.usual = MlaJoins::merge, .pairs = true};
  EXPECT_EQ(choose(kPairs, 64, 4096).joins, MlaJoins::pairs) << "two workers a request";
  EXPECT_EQ(choose(kPairs, 65, 4096).joins, MlaJoins::pairs);
  EXPECT_EQ(choose(kPairs, 32, 4096).joins, MlaJoins::merge) << "four workers a request";
}

}  // namespace
}  // namespace fovea::kernels::cuda::hopper
