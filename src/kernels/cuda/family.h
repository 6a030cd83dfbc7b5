// SPDX-License-Identifier: Apache-2.0
// Kernel families. A family is a folder below kernels/cuda with a kernel.cuh and a variants.txt,
// each line of which is one kernel of the baked set. Sources, look-up, support checks, tests and
// the listing of the command line tool derive from it.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "gpu/kernel_pack.h"

namespace fovea::kernels::cuda {

// Values of a kernel's template arguments, in the order of the family's columns.
using VariantValues = std::vector<std::string>;

struct Family {
  std::string folder;                           // "sm90/attention"
  std::vector<int> sms;                         // baked architectures, from the line "sm 90 ..."
  std::vector<std::string> columns;             // "head_dim", "q", ...
  std::vector<VariantValues> baked;             // lines
  std::shared_ptr<const gpu::Headers> headers;  // kernel.cuh and all below it, for every variant
};

// Returns every folder that has a variants.txt, sorted.
const std::vector<Family>& families();
// Throws Error{invalid_argument} that lists the known folders if there is no such family.
const Family& family(std::string_view folder);

// Returns the kernel `Config<values...>` of a family for one architecture. Baked or not, it is
// compiled from the same text.
gpu::KernelVariant make_variant(const Family& family, const VariantValues& values, int sm);

}  // namespace fovea::kernels::cuda
