// SPDX-License-Identifier: Apache-2.0
// The addresses that a captured pass contains. After one of these arrays moved, a replay would read
// memory that is freed or in other use. Record the addresses at the capture and again before a
// replay, and compare them, at least in debug builds.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"
#include "fovea/attention_backend.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace FOVEA_API fovea {

class PassAddresses {
 public:
  void add(const BatchView& batch);
  void add(const LayerTensors& layer);
  // Add the caches or states of all layers. `whose` is appended to their names: " of layer group
  // 1".
  void add(const KvPool& pool, std::string_view whose = {});
  void add(const StatePool& pool, std::string_view whose = {});
  void add(std::string array, const void* address);

  // Compares with `now`, which was filled by the same calls in the same order. Throws
  // Error{invalid_argument} naming the first array that moved, and both addresses.
  void check(const PassAddresses& now) const;

 private:
  struct Array {
    const char* name;
    const void* address;
  };
  void add(std::initializer_list<Array> arrays, std::string_view whose);

  struct Entry {
    std::string array;
    const void* address;
  };
  std::vector<Entry> entries_;
};

}  // namespace fovea
