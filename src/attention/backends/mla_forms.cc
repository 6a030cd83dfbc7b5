// SPDX-License-Identifier: Apache-2.0
#include "attention/backends/mla_forms.h"

namespace fovea {

bool can_up_project(const AttentionSpec& spec) {
  return spec.nope_dim > 0 && !spec.batch_invariant && spec.window == 0 && spec.chunk == 0 &&
         spec.mask == MaskKind::none && !spec.has_alibi && !spec.has_sinks;
}

MlaForm choose_mla_form(const AttentionSpec& spec, int32_t q_len, int32_t kv_len) {
  if (!can_up_project(spec) || q_len < kMinUpProjected) return MlaForm::absorbed;
  const double pairs = double{1} * q_len * kv_len - 0.5 * q_len * (q_len - 1.0);
  const double projection = double{1} * spec.kv_lora_rank * (spec.nope_dim + spec.v_dim);
  const double absorbed = pairs * (2.0 * spec.kv_lora_rank + spec.rope_dim) + q_len * projection;
  const double up_projected =
      pairs * (spec.nope_dim + spec.rope_dim + spec.v_dim) + kv_len * projection;
  return up_projected < absorbed ? MlaForm::up_projected : MlaForm::absorbed;
}

}  // namespace fovea
