// SPDX-License-Identifier: Apache-2.0
// The traits that a compiled kernel reports, as KernelTraits in common/types.cuh.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/check.h"
#include "gpu/cubin.h"

namespace fovea::kernels::cuda {

inline constexpr char kTraitsSymbol[] = "fovea_traits";

struct Traits {
  int32_t threads;       // a block
  int32_t shared_bytes;  // dynamic
  int32_t row_tile;      // 0: the kernel has none
  int32_t key_tile;
};

// Throws Error{corrupt_file} naming what no kernel can have: the file that the traits come from may
// be anybody's.
inline void check_traits(const Traits& traits, std::string_view kernel) {
  constexpr int32_t kMaxThreads = 1024, kMaxSharedBytes = 1 << 18, kMaxTile = 1 << 16;
  const auto check = [&](const char* name, int32_t value, int32_t low, int32_t high) {
    if (value >= low && value <= high) return;
    fail(ErrorCode::corrupt_file, "{}: {} is {}, must be in [{}, {}]", kernel, name, value, low,
         high);
  };
  check("threads", traits.threads, 1, kMaxThreads);
  check("shared_bytes", traits.shared_bytes, 0, kMaxSharedBytes);
  check("row_tile", traits.row_tile, 0, kMaxTile);
  check("key_tile", traits.key_tile, 0, kMaxTile);
}

// Reads the traits from a cubin, without a GPU. Returns nullopt if it has none of this size. Throws
// as check_traits(), which calls the cubin `kernel`.
inline std::optional<Traits> read_traits(std::string_view cubin, std::string_view kernel) {
  const auto bytes = gpu::cubin_variable(cubin, kTraitsSymbol);
  if (!bytes || bytes->size() != sizeof(Traits)) return std::nullopt;
  Traits traits;
  std::memcpy(&traits, bytes->data(), sizeof(traits));
  check_traits(traits, kernel);
  return traits;
}

}  // namespace fovea::kernels::cuda
