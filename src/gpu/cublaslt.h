// SPDX-License-Identifier: Apache-2.0
// Matrix products on a GPU by cuBLASLt, which is loaded at run time.
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

// Returns an empty string if cuBLASLt can be used. Otherwise lists the searched places: the file
// named by FOVEA_CUBLASLT, the loader's folders, /usr/local/cuda, and the packages of every Python
// on PATH.
const std::string& why_no_cublaslt();

// Computes out [rows, n] = x [rows, k] weight^T + bias with f32 accumulation. Consecutive rows are
// `stride` elements apart.
struct MatmulParams {
  const void* x = nullptr;        // dtype
  const void* weight = nullptr;   // dtype; [n, k], or [k, n] if weight_is_kn
  const void* bias = nullptr;     // [n], out_dtype, or null
  void* out = nullptr;            // out_dtype
  DType dtype = DType::bf16;      // bf16 or f16
  DType out_dtype = DType::bf16;  // `dtype` or f32
  int64_t x_stride = 0, weight_stride = 0, out_stride = 0;
  bool weight_is_kn = false;
  int32_t rows = 0, n = 0, k = 0;
};

// Bytes of device memory that all products of a MatrixProducts share.
inline constexpr size_t kProductWorkspace = size_t{32} << 20;

// Chooses an algorithm once for each matrix shape and power of two of rows (rows rounded up), when
// such a product first runs. Each product must run once before it is captured. Products with equal
// numbers of rows, or with numbers that round to the same power of two, use one algorithm.
class MatrixProducts {
 public:
  // Allocates the workspace that all products share, so one stream must order them. With
  // `row_invariant`, every number of rows uses the algorithm chosen for `max_rows`. Throws
  // Error{unsupported} with why_no_cublaslt().
  MatrixProducts(bool row_invariant, int32_t max_rows);
  ~MatrixProducts();

  // Enqueues one product. May be captured after it has run once. Throws Error{unsupported} naming
  // the shape if no algorithm supports it.
  void run(const MatmulParams& params, Stream stream);
  size_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  // Properties that determine the algorithm.
  struct Key {
    DType dtype, out_dtype;
    bool weight_is_kn, has_bias;
    int32_t rows, n, k;
    int64_t x_stride, weight_stride, out_stride;
    uint32_t x_alignment, weight_alignment, out_alignment;  // in bytes

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
