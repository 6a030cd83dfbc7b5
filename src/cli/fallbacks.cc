// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <string>

#include "cli/commands.h"

namespace fovea::cli {

void print_fallbacks(const Engine& engine) {
  for (const std::string& note : engine.notes()) print_note(fmt::format("fovea: {}\n", note));
  if (engine.max_context() < engine.wanted_context()) {
    print_note(
        fmt::format("fovea: the context is limited to {} of {} tokens by the {:.1f} MB of caches "
                    "(--kv-memory)\n",
                    engine.max_context(), engine.wanted_context(),
                    static_cast<double>(engine.stats().memory.caches) / 1e6));
  }
  for (const GroupSelection& group : engine.selections()) {
    for (const std::string& text :
         {group.prefill.fallback, group.decode ? group.decode->fallback : std::string(),
          group.trees ? group.trees->fallback : std::string(), group.why_no_graphs}) {
      if (!text.empty()) print_note(fmt::format("fovea: {}: {}\n", group.layers, text));
    }
    const KvScale scale = group.request.cache.scale;
    if (scale == KvScale::per_tensor || scale == KvScale::per_head) {
      print_note(
          fmt::format("fovea: {}: the scales of the cache are 1, so values beyond the range of {} "
                      "are clipped\n",
                      group.layers, dtype_name(group.request.cache.dtype)));
    }
  }
}

}  // namespace fovea::cli
