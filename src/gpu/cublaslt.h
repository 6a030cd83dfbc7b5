// SPDX-License-Identifier: Apache-2.0
// Matrix products on a GPU by cuBLASLt, found at run time.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "fovea/dtype.h"
#include "gpu/gpu.h"

namespace fovea::gpu {

// Empty when cuBLASLt can be used; otherwise where it was looked for: the file named by
// FOVEA_CUBLASLT, the loader's folders, /usr/local/cuda, and the packages of every Python on PATH.
const std::string& why_no_cublaslt();

// out [rows, n] = x [rows, k] weight^T + bias, accumulated in f32. Rows are `stride` elements
// apart.
struct MatmulParams {
  const void* x = nullptr;        // dtype
  const void* weight = nullptr;   // dtype; [n, k], or [k, n] when weight_is_kn
  const void* bias = nullptr;     // [n] of out_dtype, or null
  void* out = nullptr;            // out_dtype
  DType dtype = DType::bf16;      // bf16 or f16
  DType out_dtype = DType::bf16;  // dtype or f32
  int64_t x_stride = 0, weight_stride = 0, out_stride = 0;
  bool weight_is_kn = false;
  int32_t rows = 0, n = 0, k = 0;
};

// Bytes of device memory that all products of one MatrixProducts share.
inline constexpr size_t kProductWorkspace = size_t{32} << 20;

// An algorithm is chosen once for each matrix shape and power of two of rows (the rows rounded up),
// when such a product first runs: run every one once before a capture. Equal numbers of rows, or
// any within one power of two, so use one algorithm.
class MatrixProducts {
 public:
  // Allocates the workspace all products share, so they must be ordered by one stream. With
  // `row_invariant` every number of rows uses the algorithm chosen for `max_rows`.
  // Error{unsupported} with why_no_cublaslt().
  MatrixProducts(bool row_invariant, int32_t max_rows);
  ~MatrixProducts();

  // Enqueues one product; legal in a capture once it has run. Error{unsupported} names the shape
  // that has no algorithm.
  void run(const MatmulParams& params, Stream stream);
  size_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  // What an algorithm is chosen by.
  struct Key {
    DType dtype, out_dtype;
    bool weight_is_kn, has_bias;
    int32_t rows, n, k;
    int64_t x_stride, weight_stride, out_stride;
    uint32_t x_alignment, weight_alignment, out_alignment;  // bytes

    auto operator<=>(const Key&) const = default;
  };
  struct Plan;

  Key key_of(const MatmulParams& params) const;
  std::unique_ptr<Plan> choose(const Key& key, const void* bias) const;

  void* handle_ = nullptr;
  bool row_invariant_;
  int32_t max_rows_;
  DeviceBuffer workspace_;
  std::map<Key, std::unique_ptr<Plan>> plans_;
};

}  // namespace fovea::gpu
