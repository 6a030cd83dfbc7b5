// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "core/check.h"
#include "fovea/context_parallel.h"

namespace fovea {
namespace {

void check_fields(const ContextShards& shards) {
  check_argument(shards.ranks > 0, "ranks is {}, must be positive", shards.ranks);
  check_argument(shards.interleave > 0, "interleave is {}, must be positive", shards.interleave);
}

void check_arguments(const ContextShards& shards, int32_t rank, size_t given, size_t room) {
  check_fields(shards);
  check_argument(rank >= 0 && rank < shards.ranks, "rank is {}, must be in [0, {})", rank,
                 shards.ranks);
  check_argument(room >= given, "the result has room for {} values, needs {}", room, given);
}

}  // namespace

void check_shards(const ContextShards& shards, int32_t page_size) {
  check_fields(shards);
  check_argument(page_size > 0, "page_size is {}, must be positive", page_size);
  check_argument(page_size % shards.interleave == 0, "interleave is {}, must divide page_size, {}",
                 shards.interleave, page_size);
}

void local_lengths(const ContextShards& shards, int32_t rank, std::span<const int32_t> lengths,
                   std::span<int32_t> local) {
  check_arguments(shards, rank, lengths.size(), local.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    check_argument(lengths[i] >= 0, "lengths[{}] is {}, must not be negative", i, lengths[i]);
    local[i] = static_cast<int32_t>(shards.local_length(lengths[i], rank));
  }
}

void local_slots(const ContextShards& shards, int32_t page_size, int32_t rank,
                 std::span<const int64_t> slots, std::span<int64_t> local) {
  check_arguments(shards, rank, slots.size(), local.size());
  check_shards(shards, page_size);
  for (size_t i = 0; i < slots.size(); ++i) {
    local[i] = shards.local_slot(slots[i], page_size, rank);
  }
}

void visible_lengths(const ContextShards& shards, int32_t rank, std::span<const int32_t> q_indptr,
                     std::span<const int32_t> kv_lens, std::span<int32_t> visible) {
  check_argument(q_indptr.size() == kv_lens.size() + 1,
                 "q_indptr holds {}, must hold {} for {} requests", q_indptr.size(),
                 kv_lens.size() + 1, kv_lens.size());
  check_argument(q_indptr[0] == 0, "q_indptr[0] is {}, must be 0", q_indptr[0]);
  check_arguments(shards, rank, static_cast<size_t>(std::max(0, q_indptr.back())), visible.size());
  for (size_t i = 0; i < kv_lens.size(); ++i) {
    const int64_t q_len = int64_t{q_indptr[i + 1]} - q_indptr[i];
    check_argument(q_len >= 0, "q_indptr[{}] is {}, below q_indptr[{}], {}", i + 1, q_indptr[i + 1],
                   i, q_indptr[i]);
    check_argument(kv_lens[i] == 0 || kv_lens[i] >= q_len,
                   "kv_lens[{}] is {}, must be 0 or at least its {} new tokens", i, kv_lens[i],
                   q_len);
    for (int64_t j = 0; j < q_len; ++j) {
      const int64_t position = kv_lens[i] - q_len + j;
      visible[static_cast<size_t>(q_indptr[i] + j)] =
          kv_lens[i] == 0 ? 0 : static_cast<int32_t>(shards.visible_length(position, rank));
    }
  }
}

std::vector<std::string> why_not_context_parallel(const AttentionSpec& spec) {
  std::vector<std::string> reasons;
  const auto refuse_if = [&](bool condition, std::string_view reason) {
    if (condition) reasons.emplace_back(reason);
  };
  refuse_if(is_linear(spec.kind), "linear layers have a state of the whole context on each rank");
  refuse_if(spec.scope != AttentionScope::decoder, "only the scope decoder has a context");
  refuse_if(spec.window > 0, "window: a rank's keys are not consecutive positions");
  refuse_if(spec.chunk > 0, "chunk: a rank's keys are not consecutive positions");
  refuse_if(spec.dual_chunk.chunk_size > 0,
            "dual_chunk: a rank's keys are not consecutive positions");
  refuse_if(spec.scores.has_alibi, "has_alibi: a rank's keys are not consecutive positions");
  refuse_if(spec.mask != MaskKind::none, "mask: masks of a batch count the keys of one rank");
  return reasons;
}

}  // namespace fovea
