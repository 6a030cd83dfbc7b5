// SPDX-License-Identifier: Apache-2.0
#include "attention/validate/drafts.h"

#include <string_view>

#include "core/check.h"

namespace fovea {
namespace {

int64_t nodes_of(const Drafts& drafts) { return int64_t{drafts.requests} * drafts.width; }

template <typename T>
void check_array(std::span<T> array, std::string_view name, int64_t extent) {
  check_argument(static_cast<int64_t>(array.size()) >= extent,
                 "{} has {} elements, the drafts need {}", name, array.size(), extent);
  check_aligned(array.data(), name);
}

template <typename T>
void check_optional(std::span<T> array, std::string_view name, int64_t extent) {
  if (!array.empty()) check_array(array, name, extent);
}

void check_accepted(const Drafts& drafts, const AcceptedDrafts& to) {
  check_optional(to.counts, "accepted.counts", drafts.requests);
  check_optional(to.nodes, "accepted.nodes", nodes_of(drafts));
  check_optional(to.tokens, "accepted.tokens", nodes_of(drafts));
  check_optional(to.bonus, "accepted.bonus", drafts.requests);
}

}  // namespace

void check_drafts(const Drafts& drafts, const SpeculationLimits& limits) {
  check_argument(drafts.requests >= 0 && drafts.requests <= limits.max_requests,
                 "drafts.requests is {}, must be in [0, {}]", drafts.requests, limits.max_requests);
  check_argument(drafts.width >= 1 && drafts.width <= limits.width,
                 "drafts.width is {}, must be in [1, {}]", drafts.width, limits.width);
  check_optional(drafts.parents, "drafts.parents", nodes_of(drafts));
  check_array(drafts.lens, "drafts.lens", drafts.requests);
}

void check_describe(const Drafts& drafts, const DraftPlaces& places, const DraftArrays& arrays) {
  const int64_t nodes = nodes_of(drafts);
  check_optional(arrays.ancestors, "arrays.ancestors", nodes);
  check_optional(arrays.positions, "arrays.positions", nodes);
  check_optional(arrays.first_child, "arrays.first_child", nodes);
  check_optional(arrays.next_sibling, "arrays.next_sibling", nodes);
  check_optional(arrays.out_slots, "arrays.out_slots", nodes);
  check_optional(arrays.q_indptr, "arrays.q_indptr", int64_t{drafts.requests} + 1);
  check_optional(arrays.kv_lens, "arrays.kv_lens", drafts.requests);
  if (arrays.out_slots.empty()) return;
  const TokenTable& table = places.table;
  check_argument(table.entries != nullptr, "places.table is absent, out_slots are read from it");
  check_argument(table.stride > 0 && table.rows > 0 && table.entry_tokens > 0,
                 "places.table has {} rows of {} entries of {} tokens, all must be positive",
                 table.rows, table.stride, table.entry_tokens);
  check_array(places.request_rows, "places.request_rows", drafts.requests);
}

void check_accept(const Drafts& drafts, const TargetTokens& target, const AcceptedDrafts& to) {
  check_array(drafts.tokens, "drafts.tokens", nodes_of(drafts));
  check_array(target.tokens, "target.tokens", nodes_of(drafts));
  check_accepted(drafts, to);
}

void check_accept(const Drafts& drafts, const TargetProbabilities& target,
                  const AcceptedDrafts& to) {
  check_array(drafts.tokens, "drafts.tokens", nodes_of(drafts));
  check_argument(target.vocabulary > 0, "target.vocabulary is {}, must be positive",
                 target.vocabulary);
  check_argument(target.row_stride >= target.vocabulary,
                 "target.row_stride is {}, must be at least the vocabulary of {}",
                 target.row_stride, target.vocabulary);
  check_array(target.seeds, "target.seeds", drafts.requests);
  const int64_t rows = nodes_of(drafts);
  const int64_t extent = rows == 0 ? 0 : (rows - 1) * target.row_stride + target.vocabulary;
  check_array(target.target, "target.target", extent);
  check_optional(target.draft, "target.draft", extent);
  check_accepted(drafts, to);
}

void check_commit(const Drafts& drafts, const DraftArrays& arrays, const AcceptedDrafts& accepted,
                  const CommittedArrays& committed) {
  const int64_t nodes = nodes_of(drafts);
  check_array(arrays.out_slots, "arrays.out_slots", nodes);
  check_array(accepted.counts, "accepted.counts", drafts.requests);
  check_array(accepted.nodes, "accepted.nodes", nodes);
  if (!committed.lens.empty()) {
    check_array(committed.lens, "committed.lens", drafts.requests);
    check_array(arrays.kv_lens, "arrays.kv_lens", drafts.requests);
  }
  check_argument(committed.state_slots.empty() == committed.snapshot_slots.empty(),
                 "committed.state_slots has {} elements and committed.snapshot_slots {}: both or "
                 "neither must be given",
                 committed.state_slots.size(), committed.snapshot_slots.size());
  check_optional(committed.state_slots, "committed.state_slots", drafts.requests);
  check_optional(committed.snapshot_slots, "committed.snapshot_slots", nodes);
}

void check_draft_entries(const Drafts& drafts) {
  for (int32_t request = 0; request < drafts.requests; ++request) {
    const int32_t length = drafts.lens[request];
    check_argument(length >= -1 && length <= INT32_MAX - drafts.width,
                   "drafts.lens[{}] is {}, must be in [-1, {}]", request, length,
                   INT32_MAX - drafts.width);
    for (int32_t node = 0; node < drafts.width && !drafts.parents.empty(); ++node) {
      const int32_t parent = drafts.parents[int64_t{request} * drafts.width + node];
      check_argument(parent >= -1 && parent < node,
                     "drafts.parents[{}, {}] is {}, must be in [-1, {}): an earlier node or none",
                     request, node, parent, node);
    }
  }
}

void check_place_entries(const Drafts& drafts, const DraftPlaces& places) {
  const int64_t room = places.table.stride * places.table.entry_tokens;
  for (int32_t request = 0; request < drafts.requests; ++request) {
    const int32_t row = places.request_rows[request];
    check_argument(row >= 0 && row < places.table.rows,
                   "places.request_rows[{}] is {}, must be in [0, {})", request, row,
                   places.table.rows);
    const int64_t end = int64_t{drafts.lens[request]} + drafts.width;
    check_argument(drafts.lens[request] < 0 || end <= room,
                   "request {}: its drafts end at token {}, its row of places.table has {}",
                   request, end, room);
  }
}

void check_token_entries(const Drafts& drafts, int32_t vocabulary) {
  for (int64_t i = 0; i < nodes_of(drafts); ++i) {
    // Node 0 is not tested, and neither are unused nodes and padding.
    const bool tested = i % drafts.width > 0 && drafts.lens[i / drafts.width] >= 0 &&
                        (drafts.parents.empty() || drafts.parents[i] >= 0);
    check_argument(!tested || (drafts.tokens[i] >= 0 && drafts.tokens[i] < vocabulary),
                   "drafts.tokens[{}, {}] is {}, must be in [0, {}), the vocabulary",
                   i / drafts.width, i % drafts.width, drafts.tokens[i], vocabulary);
  }
}

void check_commit_entries(const Drafts& drafts, const DraftArrays& arrays,
                          const AcceptedDrafts& accepted, int64_t slots) {
  for (int32_t request = 0; request < drafts.requests; ++request) {
    const int32_t count = accepted.counts[request];
    check_argument(count >= 0 && count <= drafts.width,
                   "accepted.counts[{}] is {}, must be in [0, {}]", request, count, drafts.width);
    const int64_t first = int64_t{request} * drafts.width;
    int32_t previous = -1;
    for (int32_t i = 0; i < count; ++i) {
      const int32_t node = accepted.nodes[first + i];
      check_argument(node > previous && node < drafts.width,
                     "accepted.nodes[{}, {}] is {}, must be in [{}, {}): nodes ascend", request, i,
                     node, previous + 1, drafts.width);
      previous = node;
    }
    for (int32_t node = 0; node < drafts.width; ++node) {
      const int64_t slot = arrays.out_slots[first + node];
      check_argument(slot >= -1 && slot < slots,
                     "arrays.out_slots[{}, {}] is {}, must be in [-1, {})", request, node, slot,
                     slots);
    }
  }
}

}  // namespace fovea
