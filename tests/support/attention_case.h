// SPDX-License-Identifier: Apache-2.0
// A named attention problem and its contents, before they are divided into pages and batches.
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
  KvCacheSpec cache;  // layout, order, dtype, scale and page_size; complete_cache() sets the rest
  ForwardMode mode = ForwardMode::decode;
  std::vector<RequestShape> requests;
  uint32_t seed = 1;

  int32_t rotary_dim = 0;  // with spec.has_rope; 0: the whole head; mla: the rotary part
  bool rope_interleaved = false;
  bool split_q = false;            // mla: the rotary part of q is a separate tensor
  bool strided = false;            // gaps between rows of every tensor and between pages
  bool prewritten = false;         // the cache already has the new tokens; save_kv is false
  bool skip_some_writes = false;   // every other new token is cached already, its out_slot is -1
  bool infinite_sinks = false;     // one sink is +inf and one is -inf
  bool growing_scores = false;     // earlier keys have larger scores, up to about a hundred
  int32_t growth_tokens = 64;      // tokens over which the scores grow, twice
  bool moved_tokens = false;       // new tokens have random positions up to their index
  bool far_item_prefixes = false;  // multi_item: prefixes cover all tokens
  bool large_codes = false;        // fp8 q: q and k use the range of e4m3, with small scales
  int32_t shared_prefix = 0;       // tokens that all requests share, in shared pages
  // Groups of group_size neighbours share group_prefix tokens, at least shared_prefix.
  int32_t group_prefix = 0, group_size = 0;
  int32_t prefix_levels = 0;  // limit; if positive, batches have shared_prefix
  int64_t workspace_budget = BatchLimits{}.workspace_budget;  // limit
  bool window_pool = false;  // the pool is a window pool with a slot map
  int64_t page_stride = 0;   // elements; 0: dense
  int32_t padding = 0;       // trailing requests of one token: row 0 of the table, page 0
};

// Prints a case in test names and failures.
inline void PrintTo(const AttentionCase& test, std::ostream* to) { *to << test.name; }

bool is_mla(const AttentionSpec& spec);
bool has_mla_weights(const AttentionSpec& spec);
bool is_cached(const AttentionSpec& spec);  // false: encoder scope
// Return the widths of a head's row of q, k, v and out in LayerTensors (mla: latent, rotary key).
int32_t q_width(const AttentionSpec& spec);
int32_t k_width(const AttentionSpec& spec);
int32_t v_width(const AttentionSpec& spec);
int32_t out_width(const AttentionSpec& spec);
double softmax_scale(const AttentionSpec& spec);

// Returns `test.cache` with two layers and the dims of `test.spec`.
KvCacheSpec complete_cache(const AttentionCase& test);
// Returns the request whose pages hold this token of `request`.
size_t owner_of(const AttentionCase& test, size_t request, int32_t token);
// Returns the smallest limits for the case in one batch.
BatchLimits limits_of(const AttentionCase& test);

// One request: contiguous values, rounded to the dtypes of q, k and v. mla: k and v are the latent
// and the rotary key.
struct RequestData {
  int32_t q_len = 0, kv_len = 0;
  std::vector<float> q;                // [q_len, q_heads, q_width]
  std::vector<float> q_succ, q_inter;  // dual_chunk: same shape as q
  std::vector<float> q_scale;          // fp8 q: [q_len, q_heads]
  std::vector<float> k;                // [kv_len, kv_heads, k_width]
  std::vector<float> v;                // [kv_len, kv_heads, v_width]
  // has_rope: the input of forward(), before rotation; mla rotates v, the rotary key.
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

// Returns the position to which a new token is rotated.
int32_t rotary_position(const RequestData& request, int32_t token);

CaseData make_data(const AttentionCase& test);

}  // namespace fovea::test
