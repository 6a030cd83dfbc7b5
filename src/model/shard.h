// SPDX-License-Identifier: Apache-2.0
// Cuts parts of a model, as read from a checkpoint, down to those of one rank of a tensor-parallel
// group. Attention and feed-forward blocks are divided by heads and columns: their first matrices
// by outputs, their last by inputs, so that a block's results over all ranks add up to the whole's.
// Matrices come from Weights::located() and are placed by shard(), so that a rank reads and holds
// its own part only. Without ranks (ModelDevice::ranks()) nothing changes. Errors name the number
// that cannot be divided.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "fovea/attention_spec.h"
#include "fovea/tensor_parallel.h"
#include "model/device.h"
#include "model/layers.h"

namespace fovea {

// Number of ranks and the device's own.
struct RankOf {
  int size = 1, rank = 0;

  explicit RankOf(const ModelDevice& device);
  bool alone() const { return size == 1; }
  ShardRange range(int64_t count) const { return shard_range(count, size, rank); }
};

// Returns the matrix that computes only these outputs, with their biases.
Linear outputs_of(Linear linear, ShardRange range);
// Returns the matrix that reads only these inputs. Rank 0 keeps the bias, which is added once.
Linear inputs_of(Linear linear, ShardRange range, const RankOf& rank);

// Places parts of a matrix of [n, k] as one matrix of these outputs in this order or, if the device
// does not benefit from that, as several.
std::vector<Linear> join_outputs(const Linear& linear, std::initializer_list<ShardRange> ranges,
                                 ModelDevice& device);

// Returns the values of the range.
std::span<const float> values_of(std::span<const float> all, ShardRange range);
// Places these rows of `width` placed values each, one behind another.
std::span<const float> rows_of(std::span<const float> all, int64_t width,
                               std::initializer_list<ShardRange> ranges, ModelDevice& device);

// Returns true if layers of this spec distribute their context over the device's ranks, which then
// all have the layers' kv heads. Other layers of such a model are divided by kv heads.
bool shares_context(const AttentionSpec& spec, const ModelDevice& device);

// Returns the heads of the rank, from a spec with all heads.
HeadShard heads_of(const AttentionSpec& whole, const ModelDevice& device);
// Returns the spec of the rank's backend: with these heads only or, if the context is distributed,
// with all heads, LSE and without sinks. Linear layers are divided by key heads; if there is one,
// as in many layers of Mamba, all ranks have it, and the value heads are divided, as are those of
// short convolutions, which have no keys.
AttentionSpec shard_spec(AttentionSpec whole, const ModelDevice& device);

// parts.spec has all heads before and those that the rank projects afterwards.
void shard(SelfAttentionParts& parts, ModelDevice& device);
void shard(MlpParts& parts, ModelDevice& device);

// Returns the experts of which the rank has a part: all or, divided by experts, its own, which it
// has whole.
ShardRange experts_of(int64_t count, const ModelDevice& device);
void shard_expert(MlpParts& parts, ModelDevice& device);

}  // namespace fovea
