// SPDX-License-Identifier: Apache-2.0
// The cases of mla_decode_test.cc: batches, shapes, caches and masks, for both kernels.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/mla_decode.h"

namespace fovea::kernels::cuda {

using MlaRequests = std::vector<std::pair<int32_t, int32_t>>;  // q_len, kv_len

struct MlaDecodeCase {
  std::string name;
  MlaRequests requests;
  int32_t heads = 128, rank = 512, rope = 64, page_size = 64;
  bool tree = false, batch_invariant = false;
  int32_t window = 0;  // kernels of portable_mla only
  float spread = 1;    // scale of the keys: large ones move the maxima of the softmax
  DType dtype = DType::bf16;
  MlaCache cache = MlaCache::as_queries;
  bool scale_per_token = false;
  const MlaFamily* family = &hopper_mla();
  int32_t max_kv_len = 1 << 20;  // the bound that the host knows
  int64_t distinct_pages = 0;    // > 0: requests share these pages, for lengths beyond memory
  int32_t join_patience = MlaDecodeSetup{}.join_patience;
};

using MlaDecodeCases = std::vector<MlaDecodeCase>;

inline MlaRequests mixed_requests() {
  return {{2, 900}, {1, 3000}, {0, 0}, {4, 65}, {1, 1}, {1, 64}};
}

inline MlaRequests many_requests() {
  MlaRequests many;
  for (int32_t i = 0; i < 200; ++i) many.emplace_back(1, i * 7919 % 500);
  return many;
}

// Lengths, numbers of requests, drafts, moving maxima.
inline void add_batches(MlaDecodeCases& list) {
  list.push_back({.name = "lengths",
                  .requests = {{1, 0},
                               {1, 1},
                               {1, 2},
                               {1, 15},
                               {1, 17},
                               {1, 63},
                               {1, 64},
                               {1, 65},
                               {1, 127},
                               {1, 129},
                               {1, 4097}}});
  list.push_back({.name = "one_long", .requests = {{1, 20000}}, .heads = 16});
  list.push_back({.name = "more_new_than_keys", .requests = {{5, 2}, {3, 3}, {2, 0}}, .heads = 16});
  list.push_back({.name = "mixed", .requests = mixed_requests()});
  list.push_back({.name = "many_short", .requests = many_requests()});
  list.push_back({.name = "many_equal", .requests = MlaRequests(150, {1, 128})});
  list.push_back({.name = "verify_8", .requests = {{8, 900}, {8, 500}, {7, 64}}});
  list.push_back(
      {.name = "tree", .requests = {{15, 300}, {15, 15}, {15, 2000}}, .heads = 20, .tree = true});
  list.push_back({.name = "moving_maxima", .requests = {{1, 3000}}, .spread = 12});
  list.push_back(
      {.name = "batch_invariant", .requests = mixed_requests(), .batch_invariant = true});
}

// Pages, heads, widths of rows, fp16.
inline void add_shapes(MlaDecodeCases& list) {
  for (const int32_t page : {1, 3, 8, 16, 32, 128, 256}) {
    list.push_back(
        {.name = "page_" + std::to_string(page), .requests = mixed_requests(), .page_size = page});
  }
  for (const int32_t heads : {1, 5, 16, 20, 64, 96}) {
    list.push_back(
        {.name = "heads_" + std::to_string(heads), .requests = mixed_requests(), .heads = heads});
  }
  list.push_back(
      {.name = "page_1_heads_16", .requests = {{1, 900}, {1, 64}}, .heads = 16, .page_size = 1});
  list.push_back({.name = "rank_256", .requests = mixed_requests(), .rank = 256});
  list.push_back({.name = "rank_256_heads_16", .requests = {{2, 700}}, .heads = 16, .rank = 256});
  list.push_back({.name = "no_rope", .requests = mixed_requests(), .rope = 0});
  list.push_back({.name = "f16", .requests = mixed_requests(), .dtype = DType::f16});
}

// Two workers per request: pairs of parts, one request with more parts, and some whole.
inline void add_pairs(MlaDecodeCases& list) {
  const auto pairs = [](int32_t length) {
    MlaRequests requests = {{1, 6000}, {1, 0}};
    for (int32_t i = 2; i < 30; ++i) requests.emplace_back(1, length + i * 37 % 150);
    return requests;
  };
  list.push_back({.name = "pairs", .requests = pairs(300)});
  list.push_back({.name = "pairs_short", .requests = pairs(0)});
  list.push_back({.name = "pairs_heads_72", .requests = pairs(300), .heads = 72});
  list.push_back({.name = "pairs_page_1", .requests = pairs(300), .page_size = 1});
  list.push_back({.name = "pairs_f16", .requests = pairs(300), .dtype = DType::f16});
  list.push_back({.name = "pairs_rank_256", .requests = pairs(300), .rank = 256});
  list.push_back({.name = "pairs_no_rope", .requests = pairs(300), .rope = 0});
  list.push_back(
      {.name = "pairs_tree", .requests = MlaRequests(28, {3, 500}), .heads = 40, .tree = true});
  // No more row tiles than workers, but equal pieces would leave many workers idle.
  MlaRequests uneven_pairs(3, {1, 3000});
  uneven_pairs.resize(33, {1, 1000});
  list.push_back({.name = "uneven_pairs", .requests = uneven_pairs, .heads = 72});
  MlaRequests uneven_many(20, {1, 1000});
  for (int32_t i = 20; i < 120; ++i) uneven_many.emplace_back(1, 50 + i * 37 % 150);
  for (const int32_t heads : {16, 64}) {
    list.push_back(
        {.name = "uneven_heads_" + std::to_string(heads), .requests = uneven_many, .heads = heads});
  }
  list.push_back({.name = "uneven_heads_128",
                  .requests = {uneven_many.begin() + 10, uneven_many.begin() + 65}});
}

// Parts that the blocks themselves join, and parts that the merge kernel joins.
inline void add_joined(MlaDecodeCases& list) {
  // Too many requests for clusters of blocks that join parts.
  MlaRequests merged = {{1, 9000}, {1, 0}, {1, 3000}};
  for (int32_t i = 3; i < 40; ++i) merged.emplace_back(1, i * 37 % 150);
  for (const int32_t heads : {16, 32, 64, 128}) {
    list.push_back(
        {.name = "merged_heads_" + std::to_string(heads), .requests = merged, .heads = heads});
  }
  // Blocks that join parts: 132 of them, and lists in which they do not wait for others or only for
  // some.
  list.push_back({.name = "joined_one", .requests = {{1, 8400}}, .heads = 16, .page_size = 1});
  for (const int32_t cycles : {0, 2000}) {
    const std::string of = "impatient_" + std::to_string(cycles);
    for (const int32_t heads : {5, 16, 32}) {
      list.push_back({.name = of + "_heads_" + std::to_string(heads),
                      .requests = merged,
                      .heads = heads,
                      .join_patience = cycles});
    }
    list.push_back({.name = of + "_rank_256",
                    .requests = merged,
                    .heads = 16,
                    .rank = 256,
                    .join_patience = cycles});
    list.push_back({.name = of + "_pairs",
                    .requests = MlaRequests(60, {1, 800}),
                    .heads = 16,
                    .join_patience = cycles});
  }
}

// Clusters of blocks that join parts: row tiles of one part next to others in a cluster, whole
// tiles, tiles of several parts.
inline void add_clusters(MlaDecodeCases& list) {
  const MlaRequests short_ones = {{1, 1000}, {1, 0}, {1, 1}, {1, 64}, {1, 65}, {1, 513}, {1, 300}};
  const MlaRequests uneven = {{1, 9000}, {1, 0}, {1, 1500}, {1, 300}};
  for (const int32_t heads : {1, 12, 16}) {
    const std::string of = "_heads_" + std::to_string(heads);
    list.push_back(
        {.name = "cluster_short" + of, .requests = short_ones, .heads = heads, .max_kv_len = 1000});
    list.push_back(
        {.name = "cluster_uneven" + of, .requests = uneven, .heads = heads, .max_kv_len = 1000});
  }
  for (const int32_t heads : {20, 64, 128}) {
    const std::string of = "_heads_" + std::to_string(heads);
    list.push_back(
        {.name = "cluster_one" + of, .requests = {{1, 1000}}, .heads = heads, .max_kv_len = 1024});
    // Longer than the host says: the result is still correct.
    list.push_back({.name = "cluster_longer" + of,
                    .requests = {{1, 3000}},
                    .heads = heads,
                    .max_kv_len = 1024});
  }
  list.push_back({.name = "cluster_page_8",
                  .requests = uneven,
                  .heads = 16,
                  .page_size = 8,
                  .max_kv_len = 1000});
  list.push_back({.name = "cluster_f16",
                  .requests = uneven,
                  .heads = 16,
                  .dtype = DType::f16,
                  .max_kv_len = 1000});
  list.push_back({.name = "cluster_rank_256",
                  .requests = uneven,
                  .heads = 16,
                  .rank = 256,
                  .max_kv_len = 1000});
  list.push_back(
      {.name = "cluster_no_rope", .requests = uneven, .heads = 16, .rope = 0, .max_kv_len = 1000});
  list.push_back({.name = "cluster_tree",
                  .requests = {{4, 300}, {4, 4}, {3, 900}},
                  .heads = 16,
                  .tree = true,
                  .max_kv_len = 1000});
  list.push_back({.name = "cluster_moving_maxima",
                  .requests = {{1, 3000}},
                  .heads = 16,
                  .spread = 12,
                  .max_kv_len = 1000});
}

// A few hundred pages repeated, as the row index exceeds what fits in memory.
inline void add_beyond_memory(MlaDecodeCases& list) {
  list.push_back({.name = "million", .requests = {{1, 999963}}, .heads = 5, .distinct_pages = 333});
  list.push_back({.name = "beyond_65536",
                  .requests = {{2, 65600}, {1, 131073}, {1, 7}},
                  .heads = 80,
                  .distinct_pages = 333});
}

inline void add_fp8_caches(MlaDecodeCases& list) {
  for (const auto& [name, cache] :
       {std::pair{"e4m3", MlaCache::e4m3}, {"fp8_rows", MlaCache::fp8_rows}}) {
    for (const int32_t heads : {5, 16, 20, 64, 128}) {
      list.push_back({.name = std::string(name) + "_heads_" + std::to_string(heads),
                      .requests = mixed_requests(),
                      .heads = heads,
                      .cache = cache});
    }
    for (const int32_t heads : {5, 20, 128}) {
      list.push_back({.name = std::string(name) + "_f16_heads_" + std::to_string(heads),
                      .requests = mixed_requests(),
                      .heads = heads,
                      .dtype = DType::f16,
                      .cache = cache});
    }
    list.push_back(
        {.name = std::string(name) + "_many_short", .requests = many_requests(), .cache = cache});
    for (const int32_t page : {1, 3, 16}) {
      list.push_back({.name = std::string(name) + "_page_" + std::to_string(page),
                      .requests = {{1, 0}, {1, 1}, {1, 63}, {1, 129}, {2, 4097}},
                      .page_size = page,
                      .cache = cache});
    }
  }
  list.push_back({.name = "e4m3_rank_256",
                  .requests = {{2, 700}},
                  .heads = 16,
                  .rank = 256,
                  .cache = MlaCache::e4m3});
}

// Every row tile, row tiles in several parts, keys of 0, 1 or more tiles.
inline MlaRequests small_requests() { return {{1, 70}, {0, 0}, {2, 133}, {1, 0}, {1, 1}}; }

// For tests/emulation.
inline void add_small(MlaDecodeCases& list) {
  for (const auto& [name, cache] : {std::pair{"bf16", MlaCache::as_queries},
                                    {"e4m3", MlaCache::e4m3},
                                    {"fp8_rows", MlaCache::fp8_rows}}) {
    for (const int32_t heads : {5, 16, 20}) {
      list.push_back({.name = std::string("small_") + name + "_heads_" + std::to_string(heads),
                      .requests = small_requests(),
                      .heads = heads,
                      .page_size = heads == 5    ? 1
                                   : heads == 16 ? 16
                                                 : 64,
                      .cache = cache});
    }
  }
  list.push_back({.name = "small_fp8_rows_f16",
                  .requests = small_requests(),
                  .heads = 16,
                  .page_size = 16,
                  .dtype = DType::f16,
                  .cache = MlaCache::fp8_rows});
  list.push_back({.name = "small_long", .requests = {{1, 700}}, .heads = 16, .page_size = 16});
  list.push_back({.name = "small_uneven",
                  .requests = {{1, 60}, {1, 700}, {1, 50}},
                  .heads = 16,
                  .page_size = 16});
  // Chunks of prompts and decodes: a request has many row tiles.
  list.push_back({.name = "small_chunks",
                  .requests = {{40, 55}, {1, 70}, {1, 1}, {0, 0}, {16, 16}},
                  .heads = 4});
  list.push_back({.name = "small_tree", .requests = {{7, 60}, {7, 7}}, .heads = 4, .tree = true});
  list.push_back({.name = "small_moving_maxima", .requests = {{1, 300}}, .heads = 8, .spread = 12});
}

// All cases above with the kernels of portable_mla; e4m3 also with a scale per token.
inline void add_portable_twins(MlaDecodeCases& list) {
  const size_t count = list.size();
  for (size_t i = 0; i < count; ++i) {
    MlaDecodeCase test = list[i];
    test.name = "portable_" + test.name;
    test.family = &portable_mla();
    list.push_back(test);
    if (test.cache != MlaCache::e4m3) continue;
    test.name += "_scale_per_token";
    test.scale_per_token = true;
    list.push_back(test);
  }
}

// For tests/emulation with 16 multiprocessors: behaviour of the Hopper kernels only.
inline void add_hopper_only(MlaDecodeCases& list) {
  const auto add_hopper = [&](std::string name, MlaDecodeCase test) {
    test.name = "hopper_" + name;
    list.push_back(test);
  };
  MlaRequests line;  // a worker has parts of two row tiles
  for (int32_t i = 0; i < 11; ++i) line.emplace_back(1, 60 + i * 37 % 190);
  add_hopper("wide", {.requests = line});
  add_hopper("converting_pair", {.requests = line, .page_size = 16, .cache = MlaCache::fp8_rows});
  // Two workers per request, and parts longer than a block has room for. With 72 heads the second
  // block of each has 8 rows.
  add_hopper("pairs", {.requests = {{1, 700}, {1, 0}, {1, 610}, {1, 580}}});
  add_hopper("pairs_heads_72",
             {.requests = {{1, 300}, {1, 0}, {1, 129}, {1, 65}}, .heads = 72, .page_size = 16});
  // As many requests, but of several row tiles, which are whole.
  add_hopper("no_pairs", {.requests = {{2, 130}, {2, 70}, {2, 64}, {1, 200}}});
  add_hopper("chunks", {.requests = {{6, 70}, {1, 60}, {1, 1}, {3, 3}}});
  // Joined in one cluster; in two, as the host's bound is too low; by blocks that wait, and that do
  // not.
  add_hopper("cluster", {.requests = {{1, 700}}, .heads = 16, .max_kv_len = 1000});
  add_hopper("two_clusters", {.requests = {{1, 1100}}, .heads = 12, .max_kv_len = 500});
  const MlaRequests cut = {{1, 1100}, {1, 60}, {1, 300}};
  add_hopper("joined", {.requests = cut, .heads = 16});
  add_hopper("joined_page_1", {.requests = cut, .heads = 16, .page_size = 1});
  add_hopper("impatient", {.requests = cut, .heads = 16, .join_patience = 0});
}

// Windows, which only the kernels of portable_mla support.
inline void add_portable_windows(MlaDecodeCases& list) {
  const auto add_window = [&](std::string name, MlaDecodeCase test, int32_t window) {
    test.name = "portable_" + name;
    test.family = &portable_mla();
    test.window = window;
    list.push_back(test);
  };
  add_window("window", {.requests = mixed_requests()}, 500);
  add_window("window_fp8_rows",
             {.requests = mixed_requests(), .heads = 16, .cache = MlaCache::fp8_rows}, 70);
  add_window("window_tree", {.requests = {{15, 300}, {15, 2000}}, .heads = 20, .tree = true}, 3);
  for (const int32_t heads : {5, 16, 20}) {
    add_window("small_window_heads_" + std::to_string(heads),
               {.requests = small_requests(), .heads = heads}, 65);
  }
  add_window("small_window_1", {.requests = {{1, 700}, {3, 130}}, .heads = 16, .page_size = 3}, 1);
  add_window("small_window_tree", {.requests = {{7, 60}, {7, 7}}, .heads = 4, .tree = true}, 2);
}

inline MlaDecodeCases mla_decode_cases() {
  MlaDecodeCases list;
  add_batches(list);
  add_shapes(list);
  add_pairs(list);
  add_joined(list);
  add_clusters(list);
  add_beyond_memory(list);
  add_fp8_caches(list);
  add_small(list);
  add_portable_twins(list);
  add_hopper_only(list);
  add_portable_windows(list);
  return list;
}

}  // namespace fovea::kernels::cuda
