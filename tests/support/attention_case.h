// SPDX-License-Identifier: Apache-2.0
// A named attention problem and its contents, before anything is paged or batched.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea::test {

struct RequestShape {
  int32_t q_len = 1;   // new tokens
  int32_t kv_len = 1;  // scope cross: encoder tokens; else tokens including the new ones
};

struct AttentionCase {
  std::string name;
  AttentionSpec spec;
  KvCacheSpec cache;  // layout, order, dtype, scale and page_size; complete_cache() does the rest
  ForwardMode mode = ForwardMode::decode;
  std::vector<RequestShape> requests;
  uint32_t seed = 1;

  int32_t rotary_dim = 0;  // with spec.has_rope; 0: all of a head; mla: of the rotary part
  bool rope_interleaved = false;
  bool split_q = false;           // mla: the rotary part of q is a tensor of its own
  bool strided = false;           // gaps between rows of every tensor and between pages
  bool prewritten = false;        // the cache holds the new tokens already; save_kv is false
  bool skip_some_writes = false;  // every other new token is cached already, its out_slot is -1
  bool infinite_sinks = false;    // one +inf and one -inf among them
  bool growing_scores = false;    // the earlier a key, the larger its scores, up to about a hundred
  int32_t growth_tokens = 64;     // how many tokens it takes them to grow, twice
  bool moved_tokens = false;      // new tokens stand at or before their index, in no order
  bool far_item_prefixes = false;  // multi_item: beyond all tokens, which are common then
  bool large_codes = false;        // fp8 q: q and k use all of e4m3's range; scales are as small
  int32_t shared_prefix = 0;       // tokens all requests have in common, in shared pages
  // Neighbours, group_size at a time, have group_prefix tokens in common, at least shared_prefix.
  int32_t group_prefix = 0, group_size = 0;
  int32_t prefix_levels = 0;  // of the limits; above 0 batches say what neighbours share
  int64_t workspace_budget = BatchLimits{}.workspace_budget;  // of the limits
  bool window_pool = false;  // the pool holds only what a window sees, behind a slot map
  int64_t page_stride = 0;   // elements; 0: dense
  int32_t padding = 0;       // trailing requests of one token: row 0 of the table, page 0
};

// How test names and failures show a case.
inline void PrintTo(const AttentionCase& test, std::ostream* to) { *to << test.name; }

bool is_mla(const AttentionSpec& spec);
bool has_mla_weights(const AttentionSpec& spec);
bool is_cached(const AttentionSpec& spec);  // false: encoder scope
// Widths of one head's row of q, k, v and out as LayerTensors passes them.
int32_t q_width(const AttentionSpec& spec);
int32_t k_width(const AttentionSpec& spec);
int32_t v_width(const AttentionSpec& spec);
int32_t out_width(const AttentionSpec& spec);
double softmax_scale(const AttentionSpec& spec);

// `test.cache` with two layers and the dims of `test.spec`.
KvCacheSpec complete_cache(const AttentionCase& test);
// The request from whose pages `request` reads this token.
size_t owner_of(const AttentionCase& test, size_t request, int32_t token);
// The smallest limits that hold the case in one batch.
BatchLimits limits_of(const AttentionCase& test);

// One request, contiguous, rounded to the dtypes of q, k and v.
struct RequestData {
  int32_t q_len = 0, kv_len = 0;
  std::vector<float> q;                // [q_len, q_heads, q_width]
  std::vector<float> q_succ, q_inter;  // dual_chunk: as q
  std::vector<float> q_scale;          // fp8 q: [q_len, q_heads]
  std::vector<float> k;                // [kv_len, kv_heads, k_width]
  std::vector<float> v;                // [kv_len, kv_heads, v_width]
  // has_rope: what forward() is given, before rotation; mla turns v, the rotary key.
  std::vector<float> given_q, given_k, given_v;
  std::vector<int32_t> parents;                    // tree: [q_len], -1: follows the cached tokens
  std::vector<int32_t> positions;                  // tree or moved_tokens: [q_len]
  std::vector<uint8_t> custom_mask;                // custom: [q_len, kv_len]
  std::vector<std::pair<int32_t, int32_t>> spans;  // prefix_spans
  uint32_t item_prefix = 0;                        // multi_item
  std::vector<uint16_t> pos_in_item;               // multi_item: [kv_len - item_prefix]

  int32_t cached() const { return kv_len - q_len; }
};

struct RotaryTable {
  std::vector<float> cos, sin;  // [positions, rotary_dim / 2]
  int32_t positions = 0, rotary_dim = 0;
};

struct CaseData {
  std::vector<RequestData> requests;
  std::vector<float> sinks;         // [q_heads]
  std::vector<float> alibi_slopes;  // [q_heads]
  RotaryTable rotary;               // has_rope
  std::vector<float> w_uk, w_uv;    // rounded to q_dtype
};

// Where a new token is rotated to.
int32_t rotary_position(const RequestData& request, int32_t token);

CaseData make_data(const AttentionCase& test);

}  // namespace fovea::test
