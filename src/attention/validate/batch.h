// SPDX-License-Identifier: Apache-2.0
// Checks of a batch that every plan() on the CPU makes: O(requests + tokens + spans), before
// anything is read through an index of the batch.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "attention/slot_set.h"
#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

// What slots of a batch are counted in: those of the full pool where there is a slot map.
int64_t pool_slots(const KvPool& pool);

// What a batch is held against.
struct BatchRules {
  AttentionSpec spec;
  BatchLimits limits;
  int64_t slots = 0;                       // that out_slots may name; 0 where nothing is cached
  std::span<const int64_t> slot_map = {};  // KvPool::slot_map()
  int64_t mapped_slots = 0;                // of the pool itself, into which the map leads
  int32_t page_size = 1;                   // of the pool
  int32_t state_slots = 0;                 // of the StatePool; linear kinds
};

// Throws Error{invalid_argument} that names the request or token, the array, the value and the
// limit. Entries of its table are checked where the page table is built.
void validate_batch(const BatchView& batch, const BatchRules& rules);

// Throws Error{invalid_argument} naming two tokens that write to one slot, which is not of page 0.
// The batch is valid; `written` has room for its tokens.
void check_out_slots_differ(const BatchView& batch, int32_t page_size, SlotSet& written);

// The part of it for GPUs: the host's figures and that no array is missing; the arrays are not
// looked into.
void validate_batch_shape(const BatchView& batch, const BatchRules& rules);

// Error{invalid_argument} where it is null.
void need_array(const void* array, std::string_view name);

// The table of a batch over a cache and its name. Throws unless exactly one was given.
struct NamedTable {
  std::string_view name;
  TokenTable table;
};
NamedTable validate_table(const BatchView& batch, const BatchRules& rules);

// [requests] into `first_keys`: the first key that some query of the request may see; its length
// where nothing is seen. Windows and chunks hide everything before it.
void find_first_keys(const BatchView& batch, const AttentionSpec& spec, int32_t* first_keys);

}  // namespace fovea
