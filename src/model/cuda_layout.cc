// SPDX-License-Identifier: Apache-2.0
#include "model/cuda_layout.h"

#include "core/check.h"
#include "core/quote.h"

namespace fovea {
namespace {

bool same_shape(const Linear& a, const Linear& b) {
  return a.n == b.n && a.k == b.k && a.stride == b.stride && a.is_kn == b.is_kn &&
         a.dtype == b.dtype;
}

}  // namespace

void check_cuda_matrix(const StoredTensor& tensor, std::string_view name) {
  if (tensor.dtype == DType::bf16) return;
  fail(ErrorCode::unsupported, "tensor {} is {}; on a GPU matrices must be bf16", quote(name),
       dtype_name(tensor.dtype));
}

void check_cuda_experts(const std::vector<MlpParts>& experts) {
  check_argument(!experts.empty(), "there are no experts");
  const MlpParts& first = experts[0];
  for (const MlpParts& expert : experts) {
    const bool same = same_shape(expert.gate, first.gate) && same_shape(expert.up, first.up) &&
                      same_shape(expert.down, first.down) &&
                      expert.alternates == first.alternates &&
                      expert.activation == first.activation && expert.bounds == first.bounds;
    if (!same) fail(ErrorCode::unsupported, "experts of different shapes do not run on a GPU");
  }
  for (const Linear* matrix : {&first.gate, &first.down}) {
    if (matrix->n % 8 != 0 || matrix->k % 8 != 0) {
      fail(ErrorCode::unsupported,
           "an expert's matrix is {} by {}; on a GPU both must be multiples of 8", matrix->n,
           matrix->k);
    }
  }
}

CudaExpertBuffers cuda_expert_buffers(Arena& arena, const MlpParts& shape, int64_t count,
                                      int64_t rows, int32_t top_k) {
  const int64_t width = shape.width(), choices = rows * top_k;
  CudaExpertBuffers lists{};
  lists.counts = arena.ints(count);
  lists.choices = arena.ints(count * rows);
  lists.hidden = arena.rows(choices, 2 * width);
  lists.activated = arena.rows(choices, width);
  lists.results = arena.float_rows(choices, shape.down.n);
  return lists;
}

}  // namespace fovea
