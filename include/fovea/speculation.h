// SPDX-License-Identifier: Apache-2.0
// Speculation as a transaction: drafts are written after a request's committed tokens, one pass
// verifies them, accept() chooses a path, and commit() makes its tokens the request's own in all
// of its memory. A rollback is a length: without a commit the request keeps its committed tokens.
//
//   describe()  drafts -> mask, positions, lengths and slots of the pass that verifies them
//   forward pass over draft_batch(), an ordinary pass of any backend (mask tree; chains: none)
//   accept()    tokens or probabilities of the model -> accepted nodes and the token after them
//   commit()    moves their keys, values and scales to consecutive places, and selects states
//
// The drafts of a request are a tree. Node 0 is its root: the request's last token, which is known
// but not stored yet. So a request with n accepted nodes gets n new tokens: n - 1 drafts and the
// token that the model chose after the last of them.
//
// All arrays live where the pools live. On a GPU each call enqueues one kernel and nothing waits:
// widths are fixed, and what depends on acceptance (lengths, counts, nodes) stays on the device. A
// step of draft, verification, acceptance and commit can be one captured graph.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "fovea/api.h"
#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/kv_cache.h"
#include "fovea/thread_pool.h"

namespace FOVEA_API fovea {

inline constexpr int32_t kMaxDraftNodes = 64;

// The drafts of a batch. Node n of request i is entry i * width + n of the arrays.
struct Drafts {
  int32_t requests = 0;
  int32_t width = 1;                     // nodes per request, in [1, kMaxDraftNodes]
  std::span<const int32_t> tokens = {};  // [requests, width]
  // [requests, width] the parent of each node, an earlier node of the same request. -1 for node 0,
  // and for unused nodes: they are computed but belong to no path. Absent: every node is the parent
  // of the next one. On a GPU any other number counts as -1.
  std::span<const int32_t> parents = {};
  // [requests] committed tokens of each request, those stored before its root; -1: padding, which
  // writes nothing and accepts nothing.
  std::span<const int32_t> lens = {};
};

// Where the tokens of requests are stored. Entries for `width` tokens after the committed ones must
// be there: the slots that the drafts are written to.
struct DraftPlaces {
  TokenTable table = {};
  std::span<const int32_t> request_rows = {};  // [requests] row of each request in the table
};

// The arrays that describe() writes. Absent arrays are left out.
struct DraftArrays {
  std::span<uint64_t> ancestors = {};    // [requests, width] bits of a node's ancestors and itself
  std::span<int32_t> positions = {};     // [requests, width] committed tokens + depth of the node
  std::span<int32_t> first_child = {};   // [requests, width] a node's first child; -1: none
  std::span<int32_t> next_sibling = {};  // [requests, width] its parent's next child; -1: none
  std::span<int64_t> out_slots = {};     // [requests, width] slot of a node; -1 for padding
  std::span<int32_t> q_indptr = {};      // [requests + 1] multiples of width
  std::span<int32_t> kv_lens = {};       // [requests] committed tokens + width; padding: 0
};

// The model's choice after each node: the most likely token, or a token drawn from its
// distribution. If the draws depend on the request and the position only, sampled text is the text
// without speculation.
struct TargetTokens {
  std::span<const int32_t> tokens = {};  // [requests, width]
};

// Distributions, for drafts that were drawn themselves. The text then has exactly the model's
// distribution, and more drafts are accepted than by TargetTokens: multi-round rejection sampling
// (arXiv:2305.09781), for chains that of arXiv:2211.17192.
//
// The children of a node must have been drawn one after the other from `draft`, without
// replacement, and in the order of their numbers. Without `draft`, drafts may be chosen in any way
// that does not look at the random numbers used here; a child is then accepted if a token drawn
// from `target` is its token.
struct TargetProbabilities {
  int32_t vocabulary = 0;
  int64_t row_stride = 0;              // elements between rows of target and of draft
  std::span<const float> target = {};  // [requests, width, vocabulary] the model's, after each node
  std::span<const float> draft = {};   // [requests, width, vocabulary] the draft model's; or absent
  std::span<const uint64_t> seeds = {};  // [requests] seed of each request's random numbers
};

// The results of accept(); absent arrays are left out.
struct AcceptedDrafts {
  std::span<int32_t> counts = {};  // [requests] accepted nodes, the root included; padding: 0
  std::span<int32_t> nodes = {};   // [requests, width] their numbers, ascending; then -1
  // [requests, width] the request's new tokens: those of the accepted drafts, and the token that
  // the model chose after the last of them; then -1.
  std::span<int32_t> tokens = {};
  // [requests] the last of these, which is the root of the next drafts. -1: padding, or the
  // probabilities are no distribution.
  std::span<int32_t> bonus = {};
};

// The arrays that commit() changes.
struct CommittedArrays {
  // [requests] committed tokens, now with the accepted ones; or absent
  std::span<int32_t> lens = {};
  // [requests] and [requests, width]; both or neither: LinearBatch's slots of the verified batch.
  // The slot of the last accepted node becomes the request's state slot, and its former state slot
  // takes the place in snapshot_slots. So the same slots can be given to the next pass.
  std::span<int32_t> state_slots = {};
  std::span<int32_t> snapshot_slots = {};
};

// Returns the batch that verifies drafts: mode target_verify, with the arrays that describe()
// wrote. Backends of chains with mask none ignore the ancestors. Positions of chains are left out,
// because they are those of the batch anyway.
BatchView draft_batch(const Drafts& drafts, const DraftPlaces& places, const DraftArrays& arrays);

struct SpeculationLimits {
  int32_t max_requests = 1;
  int32_t width = 1;
};

// Bound to the pools of one model on one device. Calls on one object must not overlap on a CPU; on
// a GPU they are ordered by the stream. All calls throw Error{invalid_argument} naming an array
// that is too short, or a field that is out of range; on the CPU also an entry that is.
class Speculation {
 public:
  virtual ~Speculation() = default;

  // `places` may be absent if arrays.out_slots is.
  virtual void describe(const Drafts& drafts, const DraftPlaces& places, const DraftArrays& arrays,
                        Stream stream = nullptr) = 0;
  virtual void accept(const Drafts& drafts, const TargetTokens& target,
                      const AcceptedDrafts& accepted, Stream stream = nullptr) = 0;
  virtual void accept(const Drafts& drafts, const TargetProbabilities& target,
                      const AcceptedDrafts& accepted, Stream stream = nullptr) = 0;
  // Moves the rows of accepted nodes in every layer of every pool. `arrays` are those of describe()
  // for the verified batch, with out_slots; `accepted` has counts and nodes. Afterwards the host
  // may shorten requests to their committed tokens (PageAllocator::truncate, WindowKvPool::unmap),
  // as soon as it knows their number.
  virtual void commit(const Drafts& drafts, const DraftArrays& arrays,
                      const AcceptedDrafts& accepted, const CommittedArrays& committed,
                      Stream stream = nullptr) = 0;
};

// `pools` are those of all layer groups, on `device`; window pools are translated by their slot
// maps. They and `threads` must outlive the object; threads is null on a GPU. All allocation
// happens here. Throws Error{invalid_argument} naming the field or pool, Error{out_of_memory}, or
// Error{unsupported} with the reason why this device has no kernels.
std::unique_ptr<Speculation> make_speculation(const SpeculationLimits& limits,
                                              std::span<KvPool* const> pools, Device device,
                                              ThreadPool* threads);

}  // namespace fovea
