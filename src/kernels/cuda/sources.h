// SPDX-License-Identifier: Apache-2.0
// The device sources, inside the library: variants that no pack has are compiled from them.
#pragma once

#include <span>
#include <string_view>

namespace fovea::kernels::cuda {

struct SourceFile {
  std::string_view name;  // as included: "kernels/cuda/common/types.cuh"
  std::string_view text;
};

// Every .cuh and variants.txt below kernels/cuda, sorted by name.
std::span<const SourceFile> source_files();

}  // namespace fovea::kernels::cuda
