// SPDX-License-Identifier: Apache-2.0
// Context parallel attention: the tokens of each request are distributed over ranks, whose results
// are merged by LSE. A group of ranks holds the same kv heads, for example those that tensor
// parallelism would replicate, and each rank keeps its own part of the q heads. For one layer
//
//   1. every rank stores the new tokens that it owns: ContextShards::local_slot();
//   2. ContextExchange::gather_queries() brings the queries of all heads of the group to each rank;
//   3. every rank attends with all of them to its own keys, with LSE and without sinks;
//   4. ContextExchange::merge() gives each rank the result of its own heads over all keys.
//
// There are three ways to keep new tokens from seeing later ones. Each new token is a request of
// its own, with the keys of visible_length(): this serves decode and verification. Or, with
// interleave 1, every N-th new token for N ranks is in one request, in causal order. Or step 3
// attends to the tokens before the new ones only (scope cross), and the new tokens see each other
// on every rank (scope ragged); StateMerger joins the two. The last two ways serve prompts.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fovea/api.h"
#include "fovea/attention_backend.h"
#include "fovea/attention_spec.h"
#include "fovea/communicator.h"
#include "fovea/merge_states.h"

namespace FOVEA_API fovea {

// Token t of a request is on rank t / interleave % ranks. Lengths and positions without "local" are
// those of the whole request. The functions throw nothing; check_shards() checks the fields.
struct ContextShards {
  int32_t ranks = 1;
  int32_t interleave = 1;  // consecutive tokens on one rank

  constexpr int32_t owner(int64_t position) const {
    return static_cast<int32_t>(position / interleave % ranks);
  }
  // The number of tokens that the owner of `position` holds before it.
  constexpr int64_t local_index(int64_t position) const {
    return position / (int64_t{interleave} * ranks) * interleave + position % interleave;
  }
  // The inverse: the position of a rank's token number `local`.
  constexpr int64_t position(int32_t rank, int64_t local) const {
    return (local / interleave * ranks + rank) * interleave + local % interleave;
  }
  // The number of tokens of [0, length) on the rank.
  constexpr int64_t local_length(int64_t length, int32_t rank) const {
    const int64_t period = int64_t{interleave} * ranks;
    const int64_t rest = length % period - int64_t{rank} * interleave;
    const int64_t last = rest < 0 ? 0 : rest < interleave ? rest : interleave;
    return length / period * interleave + last;
  }
  // The number of keys on the rank that the token at `position` sees: they come first.
  constexpr int64_t visible_length(int64_t position, int32_t rank) const {
    return local_length(position + 1, rank);
  }
  // The slot of a rank's pool for a slot of the whole, -1 on ranks that do not own it. Pages of the
  // whole have page_size * ranks tokens, those of a rank's pool have page_size and the same number,
  // so a block table serves all ranks. `interleave` divides page_size.
  constexpr int64_t local_slot(int64_t slot, int32_t page_size, int32_t rank) const {
    const int64_t wide = int64_t{page_size} * ranks, token = slot % wide;
    if (slot < 0 || owner(token) != rank) return -1;
    return slot / wide * page_size + local_index(token);
  }

  bool operator==(const ContextShards&) const = default;
};

// Throws Error{invalid_argument} naming a field that is not positive, or an interleave that does
// not divide page_size.
void check_shards(const ContextShards& shards, int32_t page_size);

// local[i] = shards.local_length(lengths[i], rank). Throws Error{invalid_argument} for a negative
// length, a rank out of range, or a `local` that is shorter than `lengths`.
void local_lengths(const ContextShards& shards, int32_t rank, std::span<const int32_t> lengths,
                   std::span<int32_t> local);
// local[i] = shards.local_slot(slots[i], page_size, rank). Errors likewise; slots below 0 give -1.
void local_slots(const ContextShards& shards, int32_t page_size, int32_t rank,
                 std::span<const int64_t> slots, std::span<int64_t> local);
// visible[t] = keys on the rank that new token t sees, for the packed new tokens of a batch: token
// j of request i is at position kv_lens[i] - (q_indptr[i + 1] - q_indptr[i]) + j.
void visible_lengths(const ContextShards& shards, int32_t rank, std::span<const int32_t> q_indptr,
                     std::span<const int32_t> kv_lens, std::span<int32_t> visible);

// Returns why layers of this spec cannot have their context on several ranks, one sentence for each
// reason; empty if they can. A rank's keys are not consecutive positions, so whatever measures
// distances between a query and a key would be wrong: windows, chunks, dual chunks, ALiBi. Masks
// with the content of a batch and layers with recurrent states are refused, too.
std::vector<std::string> why_not_context_parallel(const AttentionSpec& spec);

// How states travel. Both give the result of one rank up to rounding, with equal bits in each run.
enum class ContextMerge : uint8_t {
  all_to_all,      // outputs and LSE in one exchange; each rank merges its own heads
  gather_scatter,  // LSE to all, then a sum of weighted outputs in fp32 over the ranks
};

struct ContextExchangeShape {
  DType dtype = DType::f32;  // type of q and of outputs: fp32, fp16 or bf16; on a GPU 16 bits
  int32_t heads = 0;         // q heads of one rank
  int32_t q_dim = 0;         // values per head of q; on a GPU a multiple of 8
  int32_t dim = 0;           // values per head of outputs; likewise
  int32_t max_tokens = 0;    // new tokens of one call
  ContextMerge merge = ContextMerge::all_to_all;
  Device device = {};  // where the arrays are: that of the communicator
};

// Bound to one shape and one communicator, whose ranks make the same calls. Allocates nothing after
// its construction. Calls on one object must not overlap. On a GPU, calls are enqueued, also in a
// capture, rows begin at multiples of 16 bytes, and all calls of a communicator are on one stream.
class ContextExchange {
 public:
  virtual ~ContextExchange() = default;
  // Copies q [tokens, heads, q_dim] of every rank to `all` [tokens, ranks * heads, q_dim] on every
  // rank: rank r's heads come r-th. The two share no memory.
  virtual void gather_queries(const HeadRows& q, const HeadRows& all, int64_t tokens,
                              Stream stream = nullptr) = 0;
  // Merges the states of all ranks: `part` [tokens, ranks * heads, dim] is over this rank's keys,
  // `merged` [tokens, heads, dim] gets this rank's heads over all keys. merged.lse may be absent.
  // Outputs of a part with an LSE of -inf may hold anything; a row that saw no key on any rank is
  // (0, -inf). sinks: [heads] of this rank or null, added to the denominators after the merge, as
  // ScoreSpec::has_sinks does; merged.lse is without them.
  virtual void merge(const AttentionState& part, const AttentionState& merged, int64_t tokens,
                     const float* sinks = nullptr, Stream stream = nullptr) = 0;
};

// Returns an exchange. The communicator and the threads, which a GPU does not use, must outlive it.
// Throws Error{invalid_argument} naming the field that is out of range, or Error{unsupported} for
// types and widths without a kernel, for gather_scatter on a GPU, and for more than 8 GPUs.
std::unique_ptr<ContextExchange> make_context_exchange(const ContextExchangeShape& shape,
                                                       Communicator& ranks, ThreadPool& threads);

struct ContextBackendOptions {
  AttentionSpec spec = {};  // the local backend's: q heads of all ranks, needs_lse, no sinks
  ContextShards shards = {};
  int32_t page_size = 0;  // tokens of a page of the rank's pool
  ContextMerge merge = ContextMerge::all_to_all;
};

// Returns the limits that the local backend of make_context_backend() is selected for.
BatchLimits local_limits(const ContextShards& shards, const BatchLimits& limits, DeviceKind device);

// Returns a backend that does the steps above with `local`, a backend over the rank's pool. All
// ranks plan the same batches and run the same layers:
// - Batches are those of the whole: lengths, and tables and out_slots over pages of page_size *
//   ranks tokens. Positions are not used. On the CPU, and with an interleave above 1, every new
//   token becomes a request of its own, so prompts take long; hints are not used there.
// - LayerTensors have q, out, lse and sinks of the rank's own heads, and the new k and v of all kv
//   heads; mla: q with its rotary part, and the weights of all heads.
// Its workspace is the local backend's, on a GPU with that of the states of all heads; messages
// take memory of their own. A captured pass serves any lengths, as that of the local backend does.
// The communicator and the threads, which a GPU does not use, must outlive it. Throws as
// make_context_exchange(), and Error{invalid_argument} with the reasons of
// why_not_context_parallel() or naming a field.
std::unique_ptr<AttentionBackend> make_context_backend(std::unique_ptr<AttentionBackend> local,
                                                       const ContextBackendOptions& options,
                                                       Communicator& ranks, ThreadPool& threads);

}  // namespace fovea
