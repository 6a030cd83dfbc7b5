// SPDX-License-Identifier: Apache-2.0
#include "model/shard.h"

#include <array>

#include "core/check.h"
#include "fovea/context_parallel.h"

namespace fovea {
namespace {

const std::byte* element(const Linear& linear, int64_t index) {
  return linear.weight + index * static_cast<int64_t>(dtype_bytes(linear.dtype));
}

}  // namespace

RankOf::RankOf(const ModelDevice& device) {
  if (const Communicator* ranks = device.ranks()) {
    size = ranks->size();
    rank = ranks->rank();
  }
}

Linear outputs_of(Linear linear, ShardRange range) {
  linear.weight = element(linear, range.begin * (linear.is_kn ? 1 : linear.stride));
  linear.n = static_cast<int32_t>(range.count);
  if (linear.bias != nullptr) linear.bias += range.begin;
  return linear;
}

Linear inputs_of(Linear linear, ShardRange range, const RankOf& rank) {
  linear.weight = element(linear, range.begin * (linear.is_kn ? linear.stride : 1));
  linear.k = static_cast<int32_t>(range.count);
  if (rank.rank != 0) linear.bias = nullptr;
  return linear;
}

std::vector<Linear> join_outputs(const Linear& linear, std::initializer_list<ShardRange> ranges,
                                 ModelDevice& device) {
  if (RankOf(device).alone()) return {linear};
  std::vector<Linear> parts;
  for (const ShardRange& range : ranges) parts.push_back(outputs_of(linear, range));
  if (const Linear joined = device.join_parts(parts)) return {joined};
  for (Linear& part : parts) part = device.place_part(part);
  return parts;
}

std::span<const float> values_of(std::span<const float> all, ShardRange range) {
  return all.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.count));
}

std::span<const float> rows_of(std::span<const float> all, int64_t width,
                               std::initializer_list<ShardRange> ranges, ModelDevice& device) {
  const std::vector<float> values = device.read(all);
  std::vector<float> own;
  for (const ShardRange& range : ranges) {
    const auto begin = values.begin() + range.begin * width;
    own.insert(own.end(), begin, begin + range.count * width);
  }
  return device.place(std::move(own));
}

bool shares_context(const AttentionSpec& spec, const ModelDevice& device) {
  return device.shares_contexts() && !RankOf(device).alone() &&
         why_not_context_parallel(spec).empty();
}

namespace {

AttentionSpec shard_linear(AttentionSpec spec, const RankOf& rank) {
  LinearSpec& linear = spec.linear;
  const bool is_mamba = spec.kind == AttentionKind::mamba1 || spec.kind == AttentionKind::mamba2;
  const bool has_own_keys =
      spec.kind != AttentionKind::short_conv && !(is_mamba && linear.key_heads == 1);
  const int32_t divided = has_own_keys ? linear.key_heads : linear.value_heads;
  check_argument(divided % rank.size == 0,
                 "ranks is {}, must divide the {} {} heads of linear layers", rank.size, divided,
                 has_own_keys ? "key" : "value");
  if (has_own_keys) linear.key_heads /= rank.size;
  linear.value_heads /= rank.size;
  return spec;
}

}  // namespace

HeadShard heads_of(const AttentionSpec& whole, const ModelDevice& device) {
  const RankOf rank(device);
  if (!shares_context(whole, device)) {
    return shard_heads(whole.q_heads, whole.kv_heads, rank.size, rank.rank);
  }
  HeadShard heads = shard_heads(whole.q_heads, 1, rank.size, rank.rank);
  heads.kv_heads = whole.kv_heads;
  return heads;
}

AttentionSpec shard_spec(AttentionSpec whole, const ModelDevice& device) {
  const RankOf rank(device);
  if (rank.alone()) return whole;
  if (is_linear(whole.kind)) return shard_linear(whole, rank);
  if (shares_context(whole, device)) {
    whole.needs_lse = true;
    whole.scores.has_sinks = false;
    return whole;
  }
  const HeadShard heads = heads_of(whole, device);
  whole.q_heads = heads.q_heads;
  whole.kv_heads = heads.kv_heads;
  return whole;
}

void shard(SelfAttentionParts& parts, ModelDevice& device) {
  const RankOf rank(device);
  if (rank.alone()) return;
  const AttentionSpec& spec = parts.spec;
  const HeadShard heads = heads_of(spec, device);
  const int64_t q_width = int64_t{spec.head_dim} * (parts.has_output_gate ? 2 : 1);
  const int64_t k_width = spec.head_dim, v_width = spec.head_dim_v;
  int64_t k_first = 0, v_first = 0;  // rows of k and v in their matrices
  if (!parts.k) {
    k_first = spec.q_heads * q_width;
    v_first = k_first + spec.kv_heads * k_width;
    parts.k = parts.v = parts.q;
  }
  parts.q = outputs_of(parts.q, {heads.q_begin * q_width, heads.q_heads * q_width});
  parts.k = outputs_of(parts.k, {k_first + heads.kv_begin * k_width, heads.kv_heads * k_width});
  parts.v = outputs_of(parts.v, {v_first + heads.kv_begin * v_width, heads.kv_heads * v_width});
  if (const Linear joined = device.join_parts(std::array{parts.q, parts.k, parts.v})) {
    parts.q = joined;
    parts.k = parts.v = {};
  } else {
    for (Linear* const matrix : {&parts.q, &parts.k, &parts.v}) {
      *matrix = device.place_part(*matrix);
    }
  }
  parts.o = device.place_part(
      inputs_of(parts.o, {heads.q_begin * v_width, heads.q_heads * v_width}, rank));
  if (!parts.sinks.empty()) parts.sinks = values_of(parts.sinks, {heads.q_begin, heads.q_heads});
  if (parts.q_row_norm) {
    Norm &q = parts.q_row_norm, &k = parts.k_row_norm;
    q.weight = values_of(q.weight, {heads.q_begin * k_width, heads.q_heads * k_width});
    k.weight = values_of(k.weight, {heads.kv_begin * k_width, heads.kv_heads * k_width});
  }
  parts.spec.q_heads = heads.q_heads;
  parts.spec.kv_heads = heads.kv_heads;
}

namespace {

// Places the matrices that read the input, as one if they can be.
void place_in(MlpParts& parts, ModelDevice& device) {
  const Linear joined = parts.up ? device.join_parts(std::array{parts.gate, parts.up}) : Linear{};
  if (joined) {
    parts.gate = joined;
    parts.up = {};
    return;
  }
  parts.gate = device.place_part(parts.gate);
  if (parts.up) parts.up = device.place_part(parts.up);
}

}  // namespace

void shard(MlpParts& parts, ModelDevice& device) {
  const RankOf rank(device);
  if (rank.alone()) return;
  const int64_t width = parts.width();
  check_argument(width >= rank.size, "ranks is {}, an MLP of {} columns cannot be divided",
                 rank.size, width);
  const ShardRange own = rank.range(width);
  if (parts.up) {
    parts.up = outputs_of(parts.up, own);
    parts.gate = outputs_of(parts.gate, own);
  } else if (parts.alternates) {
    parts.gate = outputs_of(parts.gate, {2 * own.begin, 2 * own.count});
  } else {
    parts.up = outputs_of(parts.gate, {width + own.begin, own.count});
    parts.gate = outputs_of(parts.gate, own);
  }
  place_in(parts, device);
  parts.down = device.place_part(inputs_of(parts.down, own, rank));
}

ShardRange experts_of(int64_t count, const ModelDevice& device) {
  const RankOf rank(device);
  if (rank.alone() || !device.divides_experts()) return {0, count};
  check_argument(count >= rank.size, "ranks is {}, {} experts cannot be divided among them",
                 rank.size, count);
  return rank.range(count);
}

void shard_expert(MlpParts& parts, ModelDevice& device) {
  if (RankOf(device).alone() || !device.divides_experts()) return shard(parts, device);
  place_in(parts, device);
  parts.down = device.place_part(parts.down);
}

}  // namespace fovea
