// SPDX-License-Identifier: Apache-2.0
// A case as kernels take it, without a backend in between.
#pragma once

#include <optional>
#include <vector>

#include "kernels/attention.h"
#include "kernels/kv_write.h"
#include "support/packed_batch.h"
#include "support/paged_store.h"

namespace fovea::test {

// The cases that kernels take. mla weights and rotary tables are not for them: attention is the
// part between the two projections and after the rotation.
std::vector<AttentionCase> kernel_cases();

// One batch of one of kernel_cases().
class KernelProblem {
 public:
  KernelProblem(const AttentionCase& test, const CaseData& data, Fill fill);

  // Stores the new tokens; nullopt: the case stores none.
  std::optional<kernels::KvWriteParams> write_params();
  kernels::AttentionParams attention_params();
  Output output() const { return batch_->output(); }
  bool untouched_outside() const { return batch_->untouched_outside(); }

 private:
  const AttentionCase& test_;
  std::optional<PagedStore> store_;
  std::optional<PackedBatch> batch_;
  std::vector<int32_t> page_table_;
  std::vector<int32_t> kv_lens_;  // of the keys attended to
};

}  // namespace fovea::test
