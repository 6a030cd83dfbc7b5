// SPDX-License-Identifier: Apache-2.0
#include "engine/graph_addresses.h"

#include "core/check.h"

namespace fovea {

void check_addresses(std::span<const GraphAddress> captured, std::span<const GraphAddress> now,
                     int32_t requests) {
  for (size_t i = 0; i < captured.size(); ++i) {
    const GraphAddress& was = captured[i];
    if (i < now.size() && was.address == now[i].address) continue;
    const std::string place =
        was.group < 0   ? ""
        : was.layer < 0 ? fmt::format(" of layer group {}", was.group)
                        : fmt::format(" of layer {} of layer group {}", was.layer, was.group);
    fail(ErrorCode::invalid_argument,
         "{}{} is at {}, the graph for {} requests was captured with it at {}", was.array, place,
         i < now.size() ? now[i].address : nullptr, requests, was.address);
  }
}

}  // namespace fovea
