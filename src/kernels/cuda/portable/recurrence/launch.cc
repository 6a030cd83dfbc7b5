// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/portable/recurrence/launch.h"

#include <bit>
#include <string>

#include "core/check.h"
#include "core/rounding.h"
#include "kernels/cuda/family.h"

namespace fovea::kernels::cuda {

const char* recurrence_name(RecurrenceKind kind) {
  constexpr const char* kNames[] = {"delta", "mamba2", "kda", "lightning"};
  return kNames[static_cast<size_t>(kind)];
}

std::vector<gpu::KernelVariant> recurrence_variants(RecurrenceKind kind, int32_t columns, int sm) {
  check_argument(columns > 0 && columns <= kMaxStateColumns,
                 "no kernel has states of {} columns, at most {}", columns, kMaxStateColumns);
  constexpr uint32_t kMinColumns = 32;
  const auto padded = std::max(kMinColumns, std::bit_ceil(static_cast<uint32_t>(columns)));
  std::vector<gpu::KernelVariant> variants;
  for (const char* tokens : {"one", "few", "many"}) {
    variants.push_back(make_variant(family("portable/recurrence"),
                                    {recurrence_name(kind), std::to_string(padded), tokens}, sm));
  }
  return variants;
}

RecurrentKernels::RecurrentKernels(std::span<const gpu::KernelVariant> variants,
                                   gpu::KernelStore& store)
    : one_(variants[0], store), few_(variants[1], store), many_(variants[2], store) {}

void RecurrentKernels::run(RecurrenceParams params, int32_t requests, TokensOfRequest tokens,
                           gpu::Launcher launcher) const {
  const Kernel& kernel = tokens == TokensOfRequest::one   ? one_
                         : tokens == TokensOfRequest::few ? few_
                                                          : many_;
  params.tiles = ceil_div(params.rows, kernel.row_tile());
  kernel.launch(
      {static_cast<uint32_t>(params.heads * params.tiles), static_cast<uint32_t>(requests)}, params,
      launcher, kOverlapped);
}

}  // namespace fovea::kernels::cuda
