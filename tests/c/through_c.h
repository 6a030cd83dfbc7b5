// SPDX-License-Identifier: Apache-2.0
// A backend of C++ that reaches the library through its C interface, so that the contract's cases
// test that interface, too.
#pragma once

#include <array>
#include <memory>

#include "c/check_status.h"
#include "fovea/fovea.h"
#include "fovea/select_backend.h"

namespace fovea::test {

// Makes C structs from those of C++.
fovea_attention_spec to_c(const AttentionSpec& spec);
fovea_kv_cache_spec to_c(const KvCacheSpec& spec);
fovea_batch_limits to_c(const BatchLimits& limits);
fovea_device_info to_c(const DeviceInfo& info);
fovea_device to_c(Device device);

// DLTensors of one pass. They keep their addresses, and adding one allocates nothing.
class TensorList {
 public:
  explicit TensorList(Device device) : device_(to_c(device)) {}

  // Null data gives null. Strides are those of a dense array unless given.
  const DLTensor* add(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                      std::initializer_list<int64_t> strides = {});
  const DLTensor* add_on_host(const void* data, DType dtype, std::initializer_list<int64_t> shape);
  // Adds an array of unsigned integers, which no DType has.
  const DLTensor* add_unsigned(const void* data, uint8_t bits,
                               std::initializer_list<int64_t> shape);
  const DLTensor* add(const HeadRows& rows, int64_t tokens, int64_t heads, int64_t dim);
  void clear() { used_ = 0; }

 private:
  fovea_tensor& next();

  fovea_device device_;
  size_t used_ = 0;
  std::array<fovea_tensor, 64> tensors_;
};

fovea_batch to_c(const BatchView& batch, TensorList& tensors);
fovea_layer_tensors to_c(const LayerTensors& layer, const AttentionSpec& spec, int64_t tokens,
                         TensorList& tensors);

// Returns an entry whose backends are those of `entry` behind the C interface, for requests like
// `request`.
BackendEntry through_c(const BackendEntry& entry, const BackendRequest& request);

}  // namespace fovea::test
