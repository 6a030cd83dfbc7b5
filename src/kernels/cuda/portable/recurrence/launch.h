// SPDX-License-Identifier: Apache-2.0
// The recurrences of linear layers on a GPU, token by token.
#pragma once

#include <span>
#include <vector>

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

enum class RecurrenceKind { delta, mamba2, kda, lightning };
// Returns the name of a kind in variants.txt.
const char* recurrence_name(RecurrenceKind kind);
inline constexpr int32_t kMaxStateColumns = 256;

// Returns the kernels for states of up to kMaxStateColumns columns: for passes with one token a
// request, then for any.
std::vector<gpu::KernelVariant> recurrence_variants(RecurrenceKind kind, int32_t columns, int sm);

class RecurrentKernels {
 public:
  RecurrentKernels() = default;
  // Loads both kernels onto the current GPU. Errors as Kernel's constructor.
  RecurrentKernels(std::span<const gpu::KernelVariant> variants, gpu::KernelStore& store);

  // one_token: no request has more than one. Sets tiles.
  void run(RecurrenceParams params, int32_t requests, bool one_token, gpu::Launcher launcher) const;

 private:
  Kernel one_, many_;
};

}  // namespace fovea::kernels::cuda
