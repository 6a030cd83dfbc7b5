// SPDX-License-Identifier: Apache-2.0
// Decode of linear layers on Hopper, with the bits of portable/recurrence.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/portable/recurrence/launch.h"

namespace fovea::kernels::cuda {

struct RecurrentDecodeSetup {
  RecurrenceKind kind = RecurrenceKind::delta;
  int32_t rows = 0, columns = 0;  // a head's state
  StateType state_type = StateType::bf16;
  int sm = 0;
  int32_t multiprocessors = 0;
};

class RecurrentDecode {
 public:
  // Returns whether there are kernels for this setup.
  static bool serves(const RecurrentDecodeSetup& setup);
  // Returns what the constructor takes from the store.
  static gpu::KernelVariant variant(const RecurrentDecodeSetup& setup);

  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  RecurrentDecode(const RecurrentDecodeSetup& setup, gpu::KernelStore& store);

  // Returns false where portable/recurrence is faster: for few requests behind a convolution.
  bool is_faster(const RecurrenceParams& params) const;

  // For any number of tokens a request; made for few. `mixed` and the states are aligned to 16
  // bytes, with strides that are multiples of that. Sets tiles.
  void run(RecurrenceParams params, gpu::Launcher launcher) const;

 private:
  int32_t multiprocessors_;
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
