// SPDX-License-Identifier: Apache-2.0
// The memory of pools as lists of regions, as transfer libraries register and move it (NIXL,
// Mooncake): address, bytes, device. A page, or a state slot, of a region is a run of bytes at a
// fixed stride, so a request moves as the same numbered pages of every region.
//
// The owner keeps pages from being written and freed while others read them: a request holds them
// until its transfer has ended (PageAllocator::retain).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fovea/api.h"
#include "fovea/device.h"
#include "fovea/kv_cache.h"

namespace FOVEA_API fovea {

// One array of a layer.
struct PoolRegion {
  std::string name;  // "layer 3 k", "layer 3 v_scale", "layer 3 state", ...
  void* address = nullptr;
  size_t bytes = 0;        // all units together
  size_t unit_bytes = 0;   // a page, or a state slot
  size_t unit_stride = 0;  // bytes from one to the next
  int64_t units = 0;       // pages or slots, number 0 included
  Device device;

  char* unit(int64_t index) const {
    return static_cast<char*>(address) + static_cast<size_t>(index) * unit_stride;
  }
};

// The facts on which both ends of a transfer must agree. Equal checksums: pages of the same bytes
// that mean the same, so that they may be copied as they are.
struct PoolDescription {
  std::vector<PoolRegion> regions;
  std::string layout;     // the spec in words: layers, heads, dims, dtype, scales, order, page size
  uint64_t checksum = 0;  // FNV-1a of `layout`; neither addresses nor the number of pages count
};

// Throw Error{unsupported} naming the scales that the caller sets once for all pages: they are not
// part of a page; and pools whose pages are not runs of bytes.
PoolDescription describe_pool(const KvPool& pool);
PoolDescription describe_pool(const StatePool& pool);

}  // namespace fovea
