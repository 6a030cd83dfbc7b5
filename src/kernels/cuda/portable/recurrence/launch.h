// SPDX-License-Identifier: Apache-2.0
// The recurrences of linear layers on a GPU, token by token.
#pragma once

#include <span>
#include <vector>

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"

namespace fovea::kernels::cuda {

enum class RecurrenceKind { delta, mamba2, kda, lightning };  // mamba1: portable/selective_scan
// Returns the name of a kind in variants.txt.
const char* recurrence_name(RecurrenceKind kind);
inline constexpr int32_t kMaxStateColumns = 256;

// Upper bounds on the tokens of a request, those that slots have kept not counted: 1, a few, none.
enum class TokensOfRequest { one, few, any };

// Returns the kernels for states of up to kMaxStateColumns columns: for passes with one token a
// request, with a few, then for any.
std::vector<gpu::KernelVariant> recurrence_variants(RecurrenceKind kind, int32_t columns, int sm);

class RecurrentKernels {
 public:
  RecurrentKernels() = default;
  // Loads the kernels onto the current GPU. Errors as Kernel's constructor.
  RecurrentKernels(std::span<const gpu::KernelVariant> variants, gpu::KernelStore& store);

  // Sets tiles.
  void run(RecurrenceParams params, int32_t requests, TokensOfRequest tokens,
           gpu::Launcher launcher) const;

 private:
  Kernel one_, few_, many_;
};

}  // namespace fovea::kernels::cuda
