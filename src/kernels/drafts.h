// SPDX-License-Identifier: Apache-2.0
// Operations on trees of drafts, with the names of fovea/speculation.h. The structs are the
// parameter blocks of kernels, so they have plain pointers and no default values.
#pragma once

#include "kernels/philox.h"

namespace fovea::kernels {

constexpr int kMaxNodes = 64;  // kMaxDraftNodes: ancestors are the bits of one word

struct DraftTrees {
  const int32_t* tokens;   // [requests, width]; null in describe
  const int32_t* parents;  // [requests, width]; null: chains
  const int32_t* lens;     // [requests]; -1: padding
  int32_t requests, width;
};

// Returns the parent of a node, -1 for the root, unused nodes and numbers that name no earlier one.
inline int32_t parent_of(const DraftTrees& trees, int32_t request, int32_t node) {
  if (trees.parents == nullptr) return node - 1;
  const int32_t parent = trees.parents[static_cast<int64_t>(request) * trees.width + node];
  return parent >= 0 && parent < node ? parent : -1;
}

// Returns the first child of `parent` that comes after node `after`, or -1.
inline int32_t next_child_of(const DraftTrees& trees, int32_t request, int32_t parent,
                             int32_t after) {
  for (int32_t node = after + 1; node < trees.width; ++node) {
    if (parent_of(trees, request, node) == parent) return node;
  }
  return -1;
}

struct DescribeDraftsParams {
  DraftTrees trees;
  const int32_t* table;         // [.., table_stride]; null: no out_slots
  const int32_t* request_rows;  // [requests]
  int64_t table_stride;
  int32_t entry_tokens;
  // Results; null: left out.
  uint64_t* ancestors;
  int32_t *positions, *first_child, *next_sibling;
  int64_t* out_slots;
  int32_t *q_indptr, *kv_lens;
};

// Returns the slot of a token of a request, -1 beyond the row.
inline int64_t slot_of(const DescribeDraftsParams& params, int32_t request, int64_t token) {
  const int64_t entry = token / params.entry_tokens;
  if (token < 0 || entry >= params.table_stride) return -1;
  const int32_t* const row = params.table + params.request_rows[request] * params.table_stride;
  return int64_t{row[entry]} * params.entry_tokens + token % params.entry_tokens;
}

// Writes what describe() says of one node, and with node 0 what it says of the request.
inline void describe_node(const DescribeDraftsParams& params, int32_t request, int32_t node) {
  const DraftTrees& trees = params.trees;
  const int64_t row = static_cast<int64_t>(request) * trees.width + node;
  const int32_t committed = trees.lens[request];
  const bool padding = committed < 0;
  uint64_t ancestors = 0;
  int32_t depth = -1;
  for (int32_t at = node; at >= 0; at = parent_of(trees, request, at)) {
    ancestors |= uint64_t{1} << at;
    ++depth;
  }
  if (params.ancestors != nullptr) params.ancestors[row] = ancestors;
  if (params.positions != nullptr) params.positions[row] = padding ? 0 : committed + depth;
  if (params.out_slots != nullptr) {
    params.out_slots[row] = padding ? -1 : slot_of(params, request, int64_t{committed} + node);
  }
  if (params.first_child != nullptr) {
    params.first_child[row] = next_child_of(trees, request, node, node);
  }
  if (params.next_sibling != nullptr) {
    const int32_t parent = parent_of(trees, request, node);
    params.next_sibling[row] = parent < 0 ? -1 : next_child_of(trees, request, parent, node);
  }
  if (node > 0) return;
  if (params.kv_lens != nullptr) {
    params.kv_lens[request] = padding ? 0 : committed + trees.width;
  }
  if (params.q_indptr != nullptr) {
    params.q_indptr[request + 1] = (request + 1) * trees.width;
    if (request == 0) params.q_indptr[0] = 0;
  }
}

struct AcceptedNodes {      // null: left out
  int32_t* counts;          // [requests]
  int32_t *nodes, *tokens;  // [requests, width]
  int32_t* bonus;           // [requests]
};

struct AcceptTokensParams {
  DraftTrees trees;
  const int32_t* target;  // [requests, width]
  AcceptedNodes accepted;
};

// Sums of pieces of the vocabulary, by which the blocks of a request share the work on a GPU.
constexpr int kSumTiles = 512;
struct PartSums {
  double* tiles;      // [requests, kSumTiles]
  uint32_t* arrived;  // [requests]; 0 before and after
};

struct AcceptSampledParams {
  DraftTrees trees;
  const float* target;    // [requests * width, vocabulary]
  const float* draft;     // the same, or null
  const uint64_t* seeds;  // [requests]
  int64_t row_stride;
  int32_t vocabulary;
  AcceptedNodes accepted;
  PartSums sums;  // on a GPU
};

// Random numbers of a position: 0 draws its token, as without drafts, and 1 + r tests the child
// number r of the node before it.
constexpr uint32_t kDrawToken = 0, kDrawTests = 1;

// A piece of the rows of all slots of a layer that lies in consecutive bytes: of K, V or scales.
// Strides are in bytes.
struct RowPiece {
  char* base;  // address in slot 0
  int64_t page_stride, token_stride;
  const int64_t* slot_map;  // the pool's, or null
  int64_t slots;            // entries of slot_map, or slots of the pool
  int32_t page_size;
  int32_t bytes;
  int32_t unit;  // 16 or 4: addresses, strides and bytes are multiples of it; a CPU ignores it
};

// Returns the address of a slot's piece; null for slots that the pool does not have or has dropped.
inline char* piece_at(const RowPiece& piece, int64_t slot) {
  if (slot < 0 || slot >= piece.slots) return nullptr;
  if (piece.slot_map != nullptr) slot = piece.slot_map[slot];
  if (slot < 0) return nullptr;
  const auto at = static_cast<uint32_t>(slot);  // slots are 32-bit
  const auto page_size = static_cast<uint32_t>(piece.page_size);
  return piece.base + at / page_size * piece.page_stride + at % page_size * piece.token_stride;
}

// The rows of accepted nodes move to the slots of nodes 0, 1, 2 ... in this order. A node never
// moves to a later place, so no row is overwritten before it has moved.
struct CommitDraftsParams {
  const RowPiece* pieces;    // [piece_count]
  const int64_t* out_slots;  // [requests, width]
  const int32_t* counts;     // [requests]
  const int32_t* nodes;      // [requests, width]
  const int32_t* kv_lens;    // [requests]; with lens
  int32_t* lens;             // [requests] or null
  int32_t* state_slots;      // [requests] or null
  int32_t* snapshot_slots;   // [requests, width]
  int32_t piece_count;
  int32_t requests, width;
};

// Returns the number of accepted nodes of a request, within its width.
inline int32_t accepted_count(const CommitDraftsParams& params, int32_t request) {
  const int32_t count = params.counts[request];
  return count < 0 ? 0 : count < params.width ? count : params.width;
}

// Updates the length and the states of a request.
inline void commit_request(const CommitDraftsParams& params, int32_t request) {
  const int32_t count = accepted_count(params, request);
  if (count == 0) return;
  if (params.lens != nullptr) {
    params.lens[request] = params.kv_lens[request] - params.width + count;
  }
  if (params.state_slots == nullptr) return;
  const int64_t first = static_cast<int64_t>(request) * params.width;
  const int32_t last = params.nodes[first + count - 1];
  if (last < 0 || last >= params.width) return;
  const int32_t snapshot = params.snapshot_slots[first + last];
  if (snapshot < 0) return;
  params.snapshot_slots[first + last] = params.state_slots[request];
  params.state_slots[request] = snapshot;
}

}  // namespace fovea::kernels
