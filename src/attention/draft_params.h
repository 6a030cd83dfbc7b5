// SPDX-License-Identifier: Apache-2.0
// The arguments of Speculation as the operations of kernels/drafts.h take them.
#pragma once

#include "fovea/speculation.h"
#include "kernels/drafts.h"

namespace fovea {

inline kernels::DraftTrees draft_trees(const Drafts& drafts) {
  return {drafts.tokens.data(), drafts.parents.data(), drafts.lens.data(), drafts.requests,
          drafts.width};
}

inline kernels::AcceptedNodes accepted_nodes(const AcceptedDrafts& to) {
  return {to.counts.data(), to.nodes.data(), to.tokens.data(), to.bonus.data()};
}

inline kernels::DescribeDraftsParams describe_params(const Drafts& drafts,
                                                     const DraftPlaces& places,
                                                     const DraftArrays& arrays) {
  return {.trees = draft_trees(drafts),
          .table = places.table.entries,
          .request_rows = places.request_rows.data(),
          .table_stride = places.table.stride,
          .entry_tokens = places.table.entry_tokens,
          .ancestors = arrays.ancestors.data(),
          .positions = arrays.positions.data(),
          .first_child = arrays.first_child.data(),
          .next_sibling = arrays.next_sibling.data(),
          .out_slots = arrays.out_slots.data(),
          .q_indptr = arrays.q_indptr.data(),
          .kv_lens = arrays.kv_lens.data()};
}

inline kernels::AcceptTokensParams accept_params(const Drafts& drafts, const TargetTokens& target,
                                                 const AcceptedDrafts& to) {
  return {draft_trees(drafts), target.tokens.data(), accepted_nodes(to)};
}

inline kernels::AcceptSampledParams accept_params(const Drafts& drafts,
                                                  const TargetProbabilities& target,
                                                  const AcceptedDrafts& to) {
  return {.trees = draft_trees(drafts),
          .target = target.target.data(),
          .draft = target.draft.data(),
          .seeds = target.seeds.data(),
          .row_stride = target.row_stride,
          .vocabulary = target.vocabulary,
          .accepted = accepted_nodes(to),
          .sums = {}};
}

inline kernels::CommitDraftsParams commit_params(const Drafts& drafts, const DraftArrays& arrays,
                                                 const AcceptedDrafts& accepted,
                                                 const CommittedArrays& committed,
                                                 std::span<const kernels::RowPiece> pieces) {
  return {.pieces = pieces.data(),
          .out_slots = arrays.out_slots.data(),
          .counts = accepted.counts.data(),
          .nodes = accepted.nodes.data(),
          .kv_lens = arrays.kv_lens.data(),
          .lens = committed.lens.data(),
          .state_slots = committed.state_slots.data(),
          .snapshot_slots = committed.snapshot_slots.data(),
          .piece_count = static_cast<int32_t>(pieces.size()),
          .requests = drafts.requests,
          .width = drafts.width};
}

}  // namespace fovea
