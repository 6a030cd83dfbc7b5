// SPDX-License-Identifier: Apache-2.0
// Kernel families: a folder below kernels/cuda with a kernel.cuh and a variants.txt. One line of
// variants.txt is one kernel of the baked set; sources, lookup, support checks, tests and the
// listing of the command line tool all derive from it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// The values of one kernel's compile-time axes, in the order of the family's columns.
using VariantValues = std::vector<std::string>;

struct Family {
  std::string folder;                // "sm90/attention"
  std::vector<int> sms;              // architectures it is baked for, from the line "sm 90 ..."
  std::vector<std::string> columns;  // "head_dim", "q", ...
  std::vector<VariantValues> baked;  // lines
  std::shared_ptr<const gpu::Headers> headers;  // kernel.cuh and all below it, for every variant
};

// Every folder that has a variants.txt, sorted.
const std::vector<Family>& families();
// Error{invalid_argument} listing the known folders.
const Family& family(std::string_view folder);

// The kernel `Config<values...>` of a family for one architecture: baked or not, it is compiled
// from the same text.
gpu::KernelVariant make_variant(const Family& family, const VariantValues& values, int sm);

}  // namespace fovea::kernels::cuda
