// SPDX-License-Identifier: Apache-2.0
// Checks of a batch. plan() on the CPU makes all of them, O(requests + tokens + spans), before it
// reads anything through an index of the batch; on a GPU it checks shapes only.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "attention/slot_set.h"
#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

// Returns the number of slots that a batch can name: those of the full pool if there is a slot map.
int64_t pool_slots(const KvPool& pool);

// The rules that a batch is checked against.
struct BatchRules {
  AttentionSpec spec;
  BatchLimits limits;
  int64_t slots = 0;                       // upper limit of out_slots; 0 without a cache
  std::span<const int64_t> slot_map = {};  // KvPool::slot_map()
  int64_t mapped_slots = 0;                // slots of the pool itself, the map's values
  int32_t page_size = 1;                   // the pool's
  bool reserves_page_zero = true;          // the pool's
  int32_t state_slots = 0;                 // slots of the StatePool; linear kinds
  int32_t max_drafts = 0;                  // that its slots keep
  const StateMark* marks = nullptr;        // the StatePool's, in host memory
};

// Checks everything but the entries of the table, which build_page_table() checks. Throws
// Error{invalid_argument} that names the request or token, the array, the value and the limit.
void validate_batch(const BatchView& batch, const BatchRules& rules);

// Throws Error{invalid_argument} naming two tokens that write to one slot, unless only padding uses
// it. The batch is valid; `written` has room for its tokens.
void check_out_slots_differ(const BatchView& batch, const BatchRules& rules, SlotSet& written);

// Checks what a host can see of a batch on a GPU: scalars, presence, alignment and extents of
// arrays, no element.
void validate_batch_shape(const BatchView& batch, const BatchRules& rules);

// Throws Error{invalid_argument} if the array is null.
void need_array(const void* array, std::string_view name);

struct NamedTable {
  std::string_view name;
  TokenTable table;
};
// Returns the table that holds the layer's keys. Throws Error{invalid_argument} if it is absent, if
// it has no rows or if its entries are neither slots nor pages of the pool.
NamedTable validate_table(const BatchView& batch, const BatchRules& rules);

// Writes to `first_keys` ([requests]) the first key that some query of the request may see, or the
// request's length if no query sees any. Windows and chunks hide all earlier keys.
void find_first_keys(const BatchView& batch, const AttentionSpec& spec, int32_t* first_keys);

}  // namespace fovea
