// SPDX-License-Identifier: Apache-2.0
// Which Hopper kernel computes a batch, with which tile, cluster and split. These are pure
// functions of the layer, of the host's bounds of the batch, and of the clusters that fit the
// device, so tables on the CPU test them and `explain` prints them. The measured constants and
// their reasons are in choose.cc; docs/kernels has the tables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "fovea/attention_spec.h"
#include "fovea/dtype.h"
#include "kernels/cuda/common/mla_params.h"

namespace fovea::kernels::cuda {

// Rows of a block of sm90/mla_decode that joins parts in a cluster. Blocks of 64 rows would send
// each other as much as a merge reads.
inline constexpr int32_t kMlaClusterRows = 16;

namespace hopper {

// The host's bounds of a batch. They hold for every replay of a captured pass.
struct BatchBounds {
  int32_t requests = 0;      // with keys
  int32_t all_requests = 0;  // with or without keys
  int32_t tokens = 0;        // new tokens of all requests
  int32_t q_len = 1;         // new tokens of a request
  int32_t kv_len = 1;        // keys of a request
  int32_t q_heads = 1, kv_heads = 1;
  // The batch gives positions, and the layer measures something on them.
  bool has_positions = false;
  // Keys before the new tokens were written before this pass.
  bool prefix_written = false;
  // Another kernel serves other requests of the batch at the same time.
  bool concurrent = false;
};

// How many clusters of so many blocks of a kernel run at the same time.
struct ClusterCapacity {
  int32_t size = 1;
  int32_t count = 0;
};

// sm90/decode, loaded with one row tile.
struct DecodeKernel {
  int32_t row_tile = 0;                       // packed rows
  std::span<const ClusterCapacity> clusters;  // by size
};

struct DecodeChoice {
  size_t kernel = 0;
  int32_t ctas = 0;
  int32_t cluster = 1;  // CTAs of a cluster; 1: none
  // The parts of a tile go to a cluster even if CTAs then stay without work, up to so many units.
  int32_t cluster_part_units = 0;
};

// Keys of a unit of decode's plan.
inline constexpr int32_t kDecodeUnit = 16;
// Units that are worth a CTA: fewer are not a step for all of its warps.
inline constexpr int32_t kMinDecodeUnits = 8;

// Chooses among `kernels`, whose row tiles ascend: the last one takes any batch.
DecodeChoice choose_decode(const AttentionSpec& spec, int32_t multiprocessors,
                           std::span<const DecodeKernel> kernels, const BatchBounds& bounds);

// Returns how many packed rows of a request decode serves faster than prefill does, in batches that
// are not mixed and share no prefixes. splits_few_rows: prefill can split keys of 64 packed rows.
int32_t max_decode_rows(DType stored, bool splits_few_rows);

// A form of prefill that splits keys over blocks.
struct SplitForm {
  int32_t row_tile = 0;  // packed rows
  float over_whole = 1;  // time for the keys of a row tile, relative to the kernel that splits none
};

// Returns the index of the form that splits the keys of a batch, or nothing if whole row tiles keep
// the device as busy. The forms' row tiles ascend. max_decode_rows: as above; a batch with more
// rows that decode could serve is always split.
std::optional<size_t> choose_split(std::span<const SplitForm> forms, bool packed_keys,
                                   int32_t max_decode_rows, int32_t multiprocessors,
                                   const BatchBounds& bounds);

// The forms in which sm90/prefill and sm90/few_rows compute whole row tiles. A layer has some of
// them.
enum class PrefillForm : uint8_t {
  plain,          // one interval of keys per row, scores without modifiers
  general,        // any mask and scores
  few_plain,      // as plain, for requests of up to 64 packed rows, if segments are summed
  few_general,    // as general, likewise
  few_whole,      // as plain, for few row tiles of 64 rows
  few_rows,       // sm90/few_rows, if segments are summed
  pairs,          // as plain, in clusters of two blocks that share key tiles
  general_pairs,  // as general, likewise
};
inline constexpr size_t kPrefillForms = 8;

// The prefill kernels that a layer has on a device.
struct PrefillForms {
  std::array<int32_t, kPrefillForms> key_tiles{};  // in keys, by form; 0: there is no such kernel
  int32_t multiprocessors = 0;
  int32_t heads_shift = 0;     // log2 of the q heads of a row tile
  bool sums_segments = false;  // keys are summed in segments, for batch-invariant rows
  bool pairs_pass = false;     // key tiles pass the block of a pair that sees none of their keys
  bool latent_dims = false;    // 192/128 columns

  bool has(PrefillForm form) const { return key_tile(form) > 0; }
  int32_t key_tile(PrefillForm form) const { return key_tiles[static_cast<size_t>(form)]; }
};

// Chooses the form for a batch whose keys are not split. bounds.q_len: the batch's own bound, or
// its tokens if it has none. q_len_known: the batch has a bound of its own.
PrefillForm choose_prefill(const PrefillForms& forms, const BatchBounds& bounds, bool q_len_known);

// Returns the form in words: "pairs of blocks".
std::string_view describe(PrefillForm form);

// Packed rows of a request up to which sm90/few_rows serves it.
inline constexpr int32_t kMaxFewRows = 8;

// A form of sm90/few_rows in which blocks of a cluster share segments.
struct SharingForm {
  int32_t cluster = 1;       // blocks
  int32_t max_segments = 0;  // segments of the batch's only request; 0: any batch
  int32_t clusters = 0;      // clusters that run at the same time; 0: there is no such kernel
};

// Returns the index of the first form that serves a batch of `tiles` row tiles, or nothing if each
// block takes whole segments alone. segment: keys of a segment.
std::optional<size_t> choose_sharing(std::span<const SharingForm> forms, int32_t segment,
                                     int32_t tiles, const BatchBounds& bounds);

// How sm90/mla_decode can join the parts of a row tile.
struct MlaForms {
  MlaJoins usual = MlaJoins::merge;  // serves any batch
  bool pairs = false;
  bool clusters = false;
};

struct MlaChoice {
  MlaJoins joins = MlaJoins::merge;
  int32_t workers = 0;
  int32_t cluster = 1;  // blocks of a cluster
};

// Chooses how the parts of row tiles are joined. workers: those of the usual form. clusters: by
// size, of blocks with row tiles of kMlaClusterRows.
MlaChoice choose_mla(const MlaForms& forms, int32_t row_tile, int32_t workers,
                     std::span<const ClusterCapacity> clusters, const BatchBounds& bounds);

}  // namespace hopper
}  // namespace fovea::kernels::cuda
