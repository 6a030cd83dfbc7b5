// SPDX-License-Identifier: Apache-2.0
// Passes of linear layers with a few tokens a request on Hopper, by products of tensor cores, over
// slots that keep drafts and have states of 16 bits.
#pragma once

#include "kernels/cuda/common/linear_params.h"
#include "kernels/cuda/kernel.h"
#include "kernels/cuda/sm90/recurrent_decode/launch.h"

namespace fovea::kernels::cuda {

class DraftProducts {
 public:
  // Bounds the tokens of a request in a pass, and those that are replayed.
  static constexpr int32_t kMaxTokens = 8;

  // Returns whether there are kernels for this setup.
  static bool serves(const RecurrentDecodeSetup& setup);
  // Returns what the constructor takes from the store.
  static gpu::KernelVariant variant(const RecurrentDecodeSetup& setup);

  // Loads the kernel onto the current GPU. Errors as Kernel's constructor.
  DraftProducts(const RecurrentDecodeSetup& setup, gpu::KernelStore& store);

  // Returns false where sm90/recurrent_drafts is faster: for few requests.
  bool is_faster(const RecurrenceParams& params) const;

  // For up to kMaxTokens tokens a request, without snapshots. `mixed`, kept rows and states are
  // aligned to 16 bytes, with strides that are multiples of that. Sets tiles.
  void run(RecurrenceParams params, gpu::Launcher launcher) const;

 private:
  // Returns the rows of all states of a pass.
  static int64_t rows_of(const RecurrenceParams& params);

  int32_t multiprocessors_;
  int32_t rounds_of_large_;
  Kernel kernel_;
};

}  // namespace fovea::kernels::cuda
