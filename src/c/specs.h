// SPDX-License-Identifier: Apache-2.0
// Makes C++ specs from C structs. All functions throw Error{invalid_argument} naming the argument.
#pragma once

#include <string_view>

#include "fovea/attention_spec.h"
#include "fovea/batch.h"
#include "fovea/device.h"
#include "fovea/fovea.h"
#include "fovea/kv_cache.h"

namespace fovea::c {

AttentionSpec to_spec(const fovea_attention_spec* spec, std::string_view name = "spec");
KvCacheSpec to_spec(const fovea_kv_cache_spec* spec, std::string_view name = "spec");
StateCacheSpec to_spec(const fovea_state_cache_spec* spec, std::string_view name = "spec");
BatchLimits to_limits(const fovea_batch_limits* limits);

Device to_device(fovea_device device, std::string_view name = "device");
fovea_device from_device(Device device);
DeviceInfo to_device_info(const fovea_device_info* info);

}  // namespace fovea::c
