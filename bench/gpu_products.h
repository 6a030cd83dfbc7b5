// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with the matrices of a model: the time of cuBLASLt, of each variant of
// portable/skinny_gemm, of each division of sm90/narrow_gemm, and of reading the matrix.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fovea::bench {

struct ProductShape {
  int32_t n = 0, k = 0;
};

struct ProductResult {
  ProductShape shape;
  int32_t rows = 0;
  double floor_seconds = 0;  // the matrix at the read ceiling
  std::optional<double> cublaslt_seconds;
  // By SkinnyProducts::kStages; null: too many rows.
  std::vector<std::optional<double>> variant_seconds;
  // By NarrowProducts::kDivisions; null: narrow products do not compute such a product.
  std::vector<std::optional<double>> division_seconds;
  std::optional<double> narrow_seconds;  // as run() divides it
  double difference = 0;                 // from cuBLASLt's output, relative, 2-norm, the largest
};

// Measures every shape with every number of rows. Matrices rotate over more memory than caches
// hold, and calls follow each other in a graph, as in a decode step. Throws Error if the GPU or
// cuBLASLt is missing.
std::vector<ProductResult> run_products(int device, std::span<const ProductShape> shapes,
                                        std::span<const int32_t> rows,
                                        const std::function<void(std::string_view)>& progress);

// Formats as "md", "csv" or "json".
std::string format_products(std::span<const ProductResult> results, std::string_view output);

}  // namespace fovea::bench
