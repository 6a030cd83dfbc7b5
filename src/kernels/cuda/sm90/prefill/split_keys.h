// SPDX-License-Identifier: Apache-2.0
// Prefill of few row tiles over many keys: portable/plan cuts the keys of row tiles so that every
// multiprocessor has as much to do, variants `parts` compute the parts, portable/merge joins them.
#pragma once

#include "kernels/cuda/portable/merge/launch.h"
#include "kernels/cuda/sm90/common/prefill_kernel.h"
#include "kernels/cuda/sm90/prefill/variants.h"

namespace fovea::kernels::cuda::prefill {

// Rows of a tile of `parts`, and of `few_parts`.
inline constexpr int32_t kPartRows = 128, kFewPartRows = 64;

// The parts of a list, by a loaded variant.
class Parts {
 public:
  Parts(const AttentionSetup& setup, const gpu::KernelVariant& variant, int32_t rows,
        gpu::KernelStore& store)
      : setup_(setup), kernel_(setup, variant, rows, store) {}
  void share_keys(const SharedKeys& keys) { shared_keys_ = keys; }
  // With the list in given.work. `tokens`: of the planned pass at most. beside, list_settled: as
  // PrefillParams.
  void attend(const AttentionParams& given, int32_t tokens, bool beside, bool list_settled,
              int32_t layer, Stream stream);

 private:
  AttentionSetup setup_;
  PrefillKernel kernel_;
  gpu::RepeatedTensorMap q_map_;
  SharedKeys shared_keys_;
  PackedKeys packed_;
};

class SplitKeys {
 public:
  // Empty: these layers' keys are not split.
  static std::vector<gpu::KernelVariant> variants(const AttentionSetup& setup);
  // The rest is of setups with variants.
  static WorkList carve(WorkspaceCarver& workspace, const AttentionSetup& setup,
                        const BatchLimits& limits);

  SplitKeys(const AttentionSetup& setup, gpu::KernelStore& store);
  void reserve(const WorkList& work, const BatchLimits& limits) {
    work_ = work;
    max_q_len_ = limits.max_q_len;
  }
  void share_keys(const SharedKeys& keys) {
    for (Form& form : forms_) form.parts.share_keys(keys);
  }
  // Whether a batch is faster here than by sm90/decode, which could serve it.
  bool outruns_decode(const BatchParams& batch) const;
  // Whether it takes the batch: such a one, or where blocks that take whole row tiles would leave
  // others idle for long, or wait for memory. `keys`: of a request at most; `requests`: that have
  // any.
  bool plan(const BatchParams& batch, int32_t tokens, int32_t requests, int32_t keys,
            PassPlan& pass);
  void attend(const AttentionParams& given, int32_t layer, Stream stream);

 private:
  struct Form {
    int32_t rows;
    float over_whole;  // time of a row tile's keys over that of the kernel that does not split
    Kernel plan;
    Merge merge;
    Parts parts;
  };

  int32_t longest(const BatchParams& batch) const {
    return batch.max_q_len > 0 ? batch.max_q_len : max_q_len_;
  }

  bool packed_;  // sm90/decode serves no packed keys
  int32_t most_decode_rows_;
  int32_t blocks_;
  std::vector<Form> forms_;  // by rows
  Form* active_ = nullptr;   // of the planned batch
  WorkList work_{};
  int32_t max_q_len_ = 1;
  int32_t tokens_ = 0;  // of the planned pass at most
  bool beside_ = false;
  bool list_settled_ = false;
};

}  // namespace fovea::kernels::cuda::prefill
