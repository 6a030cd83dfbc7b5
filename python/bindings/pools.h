// SPDX-License-Identifier: Apache-2.0
// Pools of keys, values and states as Python objects.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <vector>

#include "fovea/kv_cache.h"
#include "python/bindings/array.h"

namespace fovea::python {

struct LendOptions {
  nb::handle device;  // None: that of the arrays
  bool keep = true;   // the arrays; if false, the caller keeps their memory
  bool reserves_page_zero = false;
};

// A pool over arrays of the caller.
class LentPool : public KvPool {
 public:
  // `layers` is a sequence of tuples of arrays as KvPool.lend() describes them.
  LentPool(const KvCacheSpec& spec, nb::handle layers, const LendOptions& options);
  const KvCacheSpec& spec() const override { return spec_; }
  int64_t pages() const override { return pages_; }
  KvLayerView layer(int32_t index) const override;
  bool reserves_page_zero() const override { return options_.reserves_page_zero; }
  Device device() const override { return device_; }

 private:
  void add_layer(nb::handle arrays);
  void add_rows(nb::handle arrays, KvLayerView& view);

  void keep(Array& array) {
    if (options_.keep) keeper_.keep(array);
  }

  KvCacheSpec spec_;
  LendOptions options_;  // its device is read by the constructor only
  int64_t pages_ = 0;    // 0: no array was read yet
  Device device_;
  bool has_device_ = false;
  std::vector<KvLayerView> views_;
  Keeper keeper_;
};

// Returns the arrays of a layer in the form that LentPool takes. `owner` keeps the pool.
nb::tuple arrays_of_layer(const KvPool& pool, int32_t index, nb::handle owner);

}  // namespace fovea::python
