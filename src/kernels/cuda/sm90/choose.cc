// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/sm90/choose.h"

#include <algorithm>

#include "core/rounding.h"

namespace fovea::kernels::cuda::hopper {
namespace {

// Elements of keys and values up to which the parts of a cluster beat more parts that meet through
// memory, if half of the CTAs have one (more elements with more CTAs): CTAs copy most of them while
// the preceding kernel ends, if they were written before this pass (chosen on H200, 2026-11-23).
constexpr int32_t kClusterPartElements = 136 * 1024;

// Packed rows of a request up to which decode is faster than prefill. It reads keys once per tile,
// and joins tiles of 16 rows slowly if lengths differ or multiprocessors stay idle (chosen on H200,
// 2026-11-24).
constexpr int32_t kMaxDecodeRows = 8;
constexpr int32_t kMaxDecodeRowsFp8 = 16;
// Packed rows of a request that decode can serve: two tiles of 16, the second of which finds the
// keys in the L2 cache.
constexpr int32_t kAllDecodeRows = 32;

// Keys of a row tile that take as long as the list, the partial results and the merge of split keys
// (chosen on H200, 2026-11-23).
constexpr float kMinIdleKeys = 2048;
// The same for packed keys, whose kernel does not wait for them (chosen on H200, 2026-11-28).
constexpr float kMinIdlePackedKeys = 1024;

// Rows of a warpgroup, and of the row tiles of a block of sm90/prefill.
constexpr int32_t kGroupRows = 64;
constexpr int32_t kRowTile = 128;
constexpr int32_t kPair = 2;
// Pairs whose q heads share no keys pay from so many key tiles on. With as many kv heads as q heads
// they pay from so many tokens on, if key tiles can pass blocks that see none of their keys.
constexpr int32_t kMinPairedTiles = 64;
constexpr int32_t kMinPassingTokens = 1024;
// Pairs cut no row tiles, so where keys are summed in segments they serve only batches of so many
// tokens per request.
constexpr int32_t kMinPairedTokens = 512;
// Pairs of blocks share segments of any length for up to so many row tiles (chosen on H200,
// 2026-11-22).
constexpr int32_t kMaxSharedTiles = 32;

// A merge takes as long as two key tiles of 16 rows, so blocks of clusters, which leave out some
// multiprocessors, may compute two tiles more, or an eighth.
constexpr int32_t kMoreTilesPart = 8;
// Wider blocks compute more rows at a time: clusters beat them up to so many key tiles (chosen on
// H200, 2026-11-22).
constexpr int32_t kMaxTilesForWide = 5;

// Returns how many keys the new tokens of a request can see.
int64_t visible_keys(const AttentionSpec& spec, const BatchBounds& bounds) {
  int64_t keys = bounds.kv_len;
  if (bounds.has_positions) return keys;
  for (const int32_t reach : {spec.window, spec.chunk}) {
    if (reach > 0) keys = std::min<int64_t>(keys, reach + bounds.q_len - 1);
  }
  return keys;
}

// Returns the row tiles of 64 rows, at most.
int64_t half_tiles(const PrefillForms& forms, const BatchBounds& bounds) {
  const int64_t tokens = kGroupRows >> forms.heads_shift;
  return bounds.requests * ceil_div(int64_t{bounds.q_len}, tokens) *
         (bounds.q_heads >> forms.heads_shift);
}

// Returns true if pairs of blocks are faster than `alone`, the kernel of single blocks. They always
// are if q heads share keys. Otherwise a pair has rows of twice as many tokens, which pays for long
// requests (chosen on H200, 2026-11-23). While another kernel runs concurrently, blocks start as
// single multiprocessors become idle.
bool in_pairs(const PrefillForms& forms, PrefillForm pairs, PrefillForm alone,
              const BatchBounds& bounds) {
  if (!forms.has(pairs) || bounds.concurrent) return false;
  if (forms.sums_segments && bounds.tokens / kMinPairedTokens < bounds.all_requests) return false;
  const bool general = pairs == PrefillForm::general_pairs;
  if (general && bounds.q_len << forms.heads_shift <= kRowTile) return false;
  const int32_t key_tile = forms.key_tile(alone);
  const bool passing = !general && bounds.q_heads == bounds.kv_heads &&
                       (forms.pairs_pass || key_tile == kGroupRows) &&
                       bounds.tokens / (kPair * kRowTile) * bounds.q_heads >= forms.multiprocessors;
  const bool long_tiles = forms.latent_dims && key_tile > kGroupRows;
  const int32_t min_tiles = long_tiles ? 2 * kMinPairedTiles : kMinPairedTiles;
  return forms.heads_shift > 0 || (passing && bounds.q_len >= kMinPassingTokens) ||
         bounds.q_len / key_tile >= min_tiles;
}

// Requests have one tile per kv head. Takes the largest clusters that fit, unless about half of the
// CTAs suffice, which leaves room for the next kernel. Few clusters, in comparison with the CTAs
// that the longest requests keep busy, are not taken: the planner would not use them, but the
// multiprocessors that no cluster fits would be lost.
void choose_cluster(const AttentionSpec& spec, std::span<const ClusterCapacity> kernel_clusters,
                    const BatchBounds& bounds, DecodeChoice& choice) {
  const int64_t keys = visible_keys(spec, bounds);
  const int64_t tiles = int64_t{bounds.requests} * spec.kv_heads;
  const int32_t multiprocessors = choice.ctas;
  const int64_t all = multiprocessors;
  const int64_t busy = std::min<int64_t>(tiles * (keys / kDecodeUnit) / kMinDecodeUnits, all);
  const int64_t cluster_part_keys = kClusterPartElements / (spec.head_dim + spec.head_dim_v);
  for (const ClusterCapacity& clusters : kernel_clusters) {
    const int32_t ctas = std::min(clusters.size * clusters.count, multiprocessors);
    const int64_t used = clusters.size * tiles;
    const int64_t part_keys =
        bounds.prefix_written ? cluster_part_keys * std::max(2 * used, all) / all : 0;
    const bool are_short = keys <= clusters.size * part_keys;
    if (used > ctas || (4 * used < 3 * busy && !are_short)) continue;
    choice.cluster = clusters.size;
    choice.ctas = ctas;
    choice.cluster_part_units = static_cast<int32_t>(part_keys / kDecodeUnit);
    if (are_short && 9 * used >= 4 * all) break;
  }
}

}  // namespace

DecodeChoice choose_decode(const AttentionSpec& spec, int32_t multiprocessors,
                           std::span<const DecodeKernel> kernels, const BatchBounds& bounds) {
  const int64_t rows = int64_t{bounds.q_len} * (spec.q_heads / spec.kv_heads);
  DecodeChoice choice = {.kernel = 0, .ctas = multiprocessors};
  while (choice.kernel + 1 < kernels.size() && rows > kernels[choice.kernel].row_tile) {
    ++choice.kernel;
  }
  const DecodeKernel& kernel = kernels[choice.kernel];
  if (rows <= kernel.row_tile) choose_cluster(spec, kernel.clusters, bounds, choice);
  return choice;
}

int32_t max_decode_rows(DType stored, bool splits_few_rows) {
  if (!splits_few_rows) return kAllDecodeRows;
  return dtype_bytes(stored) == 1 ? kMaxDecodeRowsFp8 : kMaxDecodeRows;
}

// Ignores the number of tokens: a captured pass may have fewer, and its bits must be those of an
// eager one.
std::optional<size_t> choose_split(std::span<const SplitForm> forms, bool packed_keys,
                                   int32_t max_decode_rows, int32_t multiprocessors,
                                   const BatchBounds& bounds) {
  const int64_t rows = int64_t{bounds.q_len} * (bounds.q_heads / bounds.kv_heads);
  const bool beats_decode = rows > max_decode_rows && rows <= kAllDecodeRows;
  for (size_t i = 0; i < forms.size(); ++i) {
    const SplitForm& form = forms[i];
    const int64_t tiles_of_longest = ceil_div(rows, int64_t{form.row_tile});
    if (tiles_of_longest > 1 && i + 1 < forms.size()) continue;
    const int64_t tiles = int64_t{bounds.kv_heads} * bounds.requests * tiles_of_longest;
    const auto rounds = static_cast<float>(ceil_div(tiles, int64_t{multiprocessors}));
    const float share = static_cast<float>(tiles) / static_cast<float>(multiprocessors);
    // Keys that blocks with whole row tiles would leave idle multiprocessors without.
    const float idle_keys = (rounds - form.over_whole * share) * static_cast<float>(bounds.kv_len);
    const float min_idle_keys = packed_keys ? kMinIdlePackedKeys : kMinIdleKeys;
    return idle_keys > min_idle_keys || beats_decode ? std::optional(i) : std::nullopt;
  }
  return std::nullopt;
}

PrefillForm choose_prefill(const PrefillForms& forms, const BatchBounds& bounds, bool q_len_known) {
  using enum PrefillForm;
  const bool is_plain = forms.has(plain) && !bounds.has_positions;
  PrefillForm chosen = is_plain ? plain : general;
  if (forms.sums_segments && q_len_known && bounds.q_len <= kGroupRows >> forms.heads_shift) {
    chosen = is_plain ? few_plain : few_general;
    if (is_plain && bounds.q_len << forms.heads_shift <= kMaxFewRows) chosen = few_rows;
  }
  if (forms.has(few_whole) && is_plain && half_tiles(forms, bounds) <= forms.multiprocessors) {
    chosen = few_whole;
  }
  const PrefillForm paired = is_plain ? pairs : general_pairs;
  return in_pairs(forms, paired, chosen, bounds) ? paired : chosen;
}

std::string_view describe(PrefillForm form) {
  switch (form) {
    case PrefillForm::plain:
    case PrefillForm::general:
      return "single blocks";
    case PrefillForm::few_plain:
    case PrefillForm::few_general:
    case PrefillForm::few_whole:
      return "single blocks with row tiles of 64";
    case PrefillForm::few_rows:
      return "blocks for up to 8 rows";
    case PrefillForm::pairs:
    case PrefillForm::general_pairs:
      return "pairs of blocks";
  }
  return {};
}

std::optional<size_t> choose_sharing(std::span<const SharingForm> forms, int32_t segment,
                                     int32_t tiles, const BatchBounds& bounds) {
  const int32_t keys = bounds.kv_len;
  const int64_t segments = (keys - 1) / segment + 1;
  // Requests of three segments, the last one nearly whole, are slower in one cluster than in pairs
  // (not explained; chosen on H200, 2026-11-23).
  const bool joins_slowly = 4 * int64_t{keys} > 11 * segment && keys <= 3 * segment;
  for (size_t i = 0; i < forms.size(); ++i) {
    const SharingForm& form = forms[i];
    if (tiles > form.clusters) continue;
    const bool serves =
        form.max_segments > 0
            ? bounds.all_requests == 1 && segments <= form.max_segments && !joins_slowly
            : tiles <= kMaxSharedTiles || tiles * segments <= form.clusters;
    if (serves) return i;
  }
  return std::nullopt;
}

MlaChoice choose_mla(const MlaForms& forms, int32_t row_tile, int32_t workers,
                     std::span<const ClusterCapacity> clusters, const BatchBounds& bounds) {
  MlaChoice choice = {.joins = forms.usual, .workers = workers};
  if (bounds.requests == 0) return choice;
  const int64_t rows = int64_t{bounds.q_len} * bounds.q_heads;
  // If each request is one row tile of two workers, joining its two parts leaves less to merge. The
  // kernel is slower where it joins nothing (chosen on H200, 2026-11-22).
  if (forms.pairs && rows <= row_tile && workers / bounds.requests == kPairWorkers) {
    choice.joins = MlaJoins::pairs;
    choice.workers -= choice.workers % kPairWorkers;
  }
  if (!forms.clusters) return choice;
  const int64_t tiles = bounds.requests * ceil_div(rows, int64_t{kMlaClusterRows});
  const int64_t key_tiles = ceil_div(int64_t{bounds.kv_len}, int64_t{kBlockKeys});
  const int64_t otherwise = ceil_div(tiles * key_tiles, int64_t{workers});
  // Key tiles that a block of a cluster may have.
  int64_t max_tiles = row_tile > kMlaClusterRows
                          ? kMaxTilesForWide
                          : otherwise + std::max<int64_t>(2, otherwise / kMoreTilesPart);
  bool in_one = false;
  for (const ClusterCapacity& capacity : clusters) {
    if (tiles == 0 || tiles > capacity.count) continue;
    const int64_t own = ceil_div(key_tiles, capacity.count / tiles * capacity.size);
    if (own > max_tiles) continue;
    // A larger cluster only if it has all parts of a tile and a smaller one has not.
    const bool whole = ceil_div(key_tiles, own) <= capacity.size;
    if (choice.joins == MlaJoins::clusters && (in_one || !whole)) continue;
    in_one = whole;
    max_tiles = own;
    choice = {MlaJoins::clusters, capacity.count * capacity.size, capacity.size};
  }
  return choice;
}

}  // namespace fovea::kernels::cuda::hopper
