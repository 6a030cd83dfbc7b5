// SPDX-License-Identifier: Apache-2.0
// model.safetensors.index.json: which shard of a checkpoint holds which tensor.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fovea {

struct CheckpointIndex {
  struct Entry {
    std::string tensor;
    uint32_t shard = 0;  // into shards
  };
  std::vector<std::string> shards;  // plain file names, in the order of their first mention
  std::vector<Entry> entries;       // sorted by tensor, each once
};

// Reads the text of an index. Errors name `name`, the tensor and the shard: Error{corrupt_file}
// where the text has no weight_map, names a tensor twice or a shard outside the folder. Memory is
// proportional to the text.
CheckpointIndex read_checkpoint_index(std::string_view text, std::string_view name);

}  // namespace fovea
