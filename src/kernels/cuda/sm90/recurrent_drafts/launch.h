// SPDX-License-Identifier: Apache-2.0
// Passes of linear layers with a few tokens a request on Hopper, with the bits of
// portable/recurrence.
#pragma once

#include <vector>

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/sm90/recurrent_decode/launch.h"

namespace fovea::kernels::cuda {

class RecurrentDrafts {
 public:
  // Returns whether there are kernels for this setup.
  static bool serves(const RecurrentDecodeSetup& setup);
  // Returns what the constructor takes from the store.
  static std::vector<gpu::KernelVariant> variants(const RecurrentDecodeSetup& setup);

  // Loads the kernels onto the current GPU. Errors as Kernel's constructor.
  RecurrentDrafts(const RecurrentDecodeSetup& setup, gpu::KernelStore& store);

  // For any number of tokens a request; made for few. `mixed`, kept rows and states are aligned to
  // 16 bytes, with strides that are multiples of that. Sets tiles.
  void run(RecurrenceParams params, gpu::Launcher launcher) const;

 private:
  int32_t multiprocessors_;
  Kernel small_, large_;  // by the units of a block
};

}  // namespace fovea::kernels::cuda
