// SPDX-License-Identifier: Apache-2.0
// A case in the form of kernel parameters, without a backend.
#pragma once

#include <optional>
#include <vector>

#include "kernels/attention.h"
#include "kernels/kv_write.h"
#include "support/packed_batch.h"
#include "support/paged_store.h"

namespace fovea::test {

// Returns the cases that kernels can run: those without mla weights and rotary tables, which
// backends apply before and after attention.
std::vector<AttentionCase> kernel_cases();

// One batch of a case of kernel_cases().
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
  std::vector<int32_t> kv_lens_;  // keys of each request
};

}  // namespace fovea::test
