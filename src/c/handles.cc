// SPDX-License-Identifier: Apache-2.0
#include "c/handles.h"

#include <array>

namespace fovea::c {
namespace {

constexpr std::array<std::string_view, 12> kNames = {
    "fovea_thread_pool", "fovea_selection",      "fovea_request_table", "fovea_page_allocator",
    "fovea_kv_pool",     "fovea_state_pool",     "fovea_prefix_cache",  "fovea_backend",
    "fovea_merger",      "fovea_pass_addresses", "fovea_engine",        "fovea_results"};

}  // namespace

std::string_view name_of(HandleKind kind) {
  const auto index = static_cast<size_t>(kind);
  return index < kNames.size() ? kNames[index] : "an unknown kind";
}

void check_handle(const void* given, HandleKind kind, std::string_view name) {
  check_pointer(given, name);
  check_alignment(given, alignof(HandleMark), name);
  HandleMark mark;
  std::memcpy(&mark, given, sizeof(mark));
  check(mark.magic == kHandleMagic, "{} at {} is not a handle, must be a {}", name, given,
        name_of(kind));
  check(mark.kind == kind, "{} is a {}, must be a {}", name, name_of(mark.kind), name_of(kind));
}

}  // namespace fovea::c
