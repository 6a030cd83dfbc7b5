// SPDX-License-Identifier: Apache-2.0
// What a captured pass has baked in. A replay after one of these moved would read freed or foreign
// memory.
#pragma once

#include <cstdint>
#include <span>

namespace fovea {

struct GraphAddress {
  const char* array = "";          // as errors name it
  int32_t group = -1, layer = -1;  // of the cache it belongs to; -1: of none
  const void* address = nullptr;
};

// `now` lists the same arrays in the same order. Error{invalid_argument} names the first one that
// is not where it was when the graph of `requests` requests was captured.
void check_addresses(std::span<const GraphAddress> captured, std::span<const GraphAddress> now,
                     int32_t requests);

}  // namespace fovea
