// SPDX-License-Identifier: Apache-2.0
// What a captured pass has baked in. A replay after one of these arrays moved would read freed or
// foreign memory: note the addresses at the capture, once more before a replay, and compare, in
// debug builds at least.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention_backend.h"
#include "fovea/batch.h"
#include "fovea/kv_cache.h"

namespace fovea {

class PassAddresses {
 public:
  void add(const BatchView& batch);
  void add(const LayerTensors& layer);
  // The caches of all layers. `whose` follows their names: " of layer group 1".
  void add(const KvPool& pool, std::string_view whose = {});
  void add(std::string array, const void* address);

  // `now` was filled by the same calls in the same order. Error{invalid_argument} names the first
  // array that is not where it was, and both addresses.
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
