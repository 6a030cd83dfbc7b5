// SPDX-License-Identifier: Apache-2.0
// Prefill of few row tiles over many keys: portable/plan cuts the keys of row tiles so that every
// multiprocessor has the same work, variants `parts` compute the parts, portable/merge joins them.
#pragma once

#include "kernels/cuda/portable/merge/launch.h"
#include "kernels/cuda/sm90/choose.h"
#include "kernels/cuda/sm90/common/prefill_kernel.h"
#include "kernels/cuda/sm90/prefill/variants.h"

namespace fovea::kernels::cuda::prefill {

// Rows of a row tile of the variants `parts` and `few_parts`.
inline constexpr int32_t kPartRows = 128, kFewPartRows = 64;

// A loaded variant that computes the parts of a work list.
class Parts {
 public:
  Parts(const AttentionSetup& setup, const gpu::KernelVariant& variant, int32_t rows,
        gpu::KernelStore& store)
      : setup_(setup), kernel_(setup, variant, rows, store) {}
  void share_keys(const SharedKeys& keys) { shared_keys_ = keys; }
  // Computes the list in given.work. `tokens`: those of the planned pass, at most. concurrent and
  // list_written: as in PrefillParams.
  void attend(const AttentionParams& given, int32_t tokens, bool concurrent, bool list_written,
              int32_t layer, gpu::Launcher launcher);

 private:
  AttentionSetup setup_;
  PrefillKernel kernel_;
  gpu::RepeatedTensorMap q_map_;
  SharedKeys shared_keys_;
  PackedKeys packed_;
};

class SplitKeys {
 public:
  // As hopper_max_decode_rows().
  static int32_t max_decode_rows(const AttentionSetup& setup);
  // Returns the row tile of the blocks that split the keys of a batch; nothing: none do.
  static std::optional<int32_t> row_tile(const AttentionSetup& setup,
                                         const hopper::BatchBounds& bounds);
  // Returns the kernels that the constructor takes from the store; empty: the layer's keys are
  // never split.
  static std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup);
  // The other functions are for setups with variants.
  static WorkList carve(WorkspaceCarver& workspace, const AttentionSetup& setup,
                        const BatchLimits& limits);

  SplitKeys(const AttentionSetup& setup, gpu::KernelStore& store);
  void reserve(const WorkList& work) { work_ = work; }
  // Returns true if keys of the batch are split (hopper::choose_split()); only then plans it.
  bool plan(const PlanRequest& request, hopper::BatchBounds bounds, PlanQueue& plans);
  void attend(const AttentionParams& given, int32_t layer, gpu::Launcher launcher);

 private:
  struct Form {
    Kernel plan;
    Merge merge;
    Parts parts;
  };

  bool packed_;  // keys are not in a cache
  int32_t max_decode_rows_;
  int32_t blocks_;
  std::vector<hopper::SplitForm> choices_;  // by row tile
  std::vector<Form> forms_;                 // as choices_
  WorkList work_{};
  // The planned batch:
  Form* active_ = nullptr;
  int32_t tokens_ = 0;  // at most
  bool concurrent_ = false;
  bool list_written_ = false;
};

}  // namespace fovea::kernels::cuda::prefill
