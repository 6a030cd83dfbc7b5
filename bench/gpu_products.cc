// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu_products.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "bench/gpu_ceilings.h"
#include "bench/gpu_timing.h"
#include "core/check.h"
#include "core/float_types.h"
#include "gpu/cublaslt.h"
#include "kernels/cuda/portable/skinny_gemm/launch.h"
#include "kernels/cuda/sm90/narrow_gemm/launch.h"
#include "kernels/cuda/store.h"

namespace fovea::bench {
namespace {

namespace cuda = kernels::cuda;

constexpr size_t kMatrixBytes = size_t{4} << 30;  // over which matrices rotate

class ProductBench {
 public:
  ProductBench(int device, int32_t max_rows)
      : context_(device),
        measure_(context_),
        matrices_(kMatrixBytes),
        skinny_(context_.info().sm, cuda::kernel_store()),
        narrow_(context_.info().sm, cuda::kernel_store()),
        cublaslt_(false, max_rows) {
    ceilings_ = measure_gpu_ceilings(measure_, matrices_, PowerState::burst, stream());
    measure_.fill_noise(matrices_.data(), DType::bf16, static_cast<int64_t>(kMatrixBytes / 2), 1,
                        1.0f, 0.0f, stream());
  }

  ProductResult run(const ProductShape& shape, int32_t rows) {
    ProductResult result{.shape = shape, .rows = rows};
    const size_t bytes = static_cast<size_t>(shape.n) * static_cast<size_t>(shape.k) * 2;
    check_argument(bytes <= kMatrixBytes, "{} x {} has {} bytes, must have at most {}", shape.n,
                   shape.k, bytes, kMatrixBytes);
    sets_ = static_cast<int32_t>(kMatrixBytes / bytes);
    result.floor_seconds =
        static_cast<double>(bytes) / std::max(ceilings_.read_bytes, ceilings_.bulk_read_bytes);
    x_ = gpu::DeviceBuffer(static_cast<size_t>(rows) * static_cast<size_t>(shape.k) * 2);
    measure_.fill_noise(x_.data(), DType::bf16, int64_t{rows} * shape.k, 2, 1.0f, 0.0f, stream());
    out_ = gpu::DeviceBuffer(static_cast<size_t>(rows) * static_cast<size_t>(shape.n) * 2);

    const auto multiply = [&](int32_t turn, Stream to) { cublaslt_.run(matmul(result, turn), to); };
    result.cublaslt_seconds = time(multiply);
    const std::vector<float> want = output(multiply);
    const bool is_served = cuda::SkinnyProducts::serves(skinny(result, 0));
    for (size_t variant = 0; variant < cuda::SkinnyProducts::kStages.size(); ++variant) {
      result.variant_seconds.emplace_back();
      if (!is_served) continue;
      result.variant_seconds.back() =
          time([&](int32_t turn, Stream to) { skinny_.run(skinny(result, turn), variant, to); });
    }
    if (is_served) {
      result.difference = difference(
          output([&](int32_t turn, Stream to) { skinny_.run(skinny(result, turn), to); }), want);
    }
    time_narrow(want, result);
    return result;
  }

 private:
  // Measures the divisions of narrow products. The difference is the largest one.
  void time_narrow(const std::vector<float>& want, ProductResult& result) {
    const bool is_served = narrow_.computes(skinny(result, 0));
    for (const cuda::NarrowProducts::Division& division : cuda::NarrowProducts::kDivisions) {
      result.division_seconds.emplace_back();
      if (!is_served) continue;
      const auto multiply = [&](int32_t turn, Stream to) {
        narrow_.run(skinny(result, turn), division, to);
      };
      result.difference = std::max(result.difference, difference(output(multiply), want));
      result.division_seconds.back() = time(multiply);
    }
    if (!is_served) return;
    result.narrow_seconds =
        time([&](int32_t turn, Stream to) { narrow_.run(skinny(result, turn), to); });
  }

  Stream stream() const { return stream_.get(); }
  double time(const GpuWork& work) const {
    return time_on_gpu(work, sets_, PowerState::burst, stream()).seconds;
  }

  const std::byte* matrix(const ProductShape& shape, int32_t turn) const {
    const size_t bytes = static_cast<size_t>(shape.n) * static_cast<size_t>(shape.k) * 2;
    return matrices_.data<std::byte>() + static_cast<size_t>(turn % sets_) * bytes;
  }

  template <typename Params>
  Params params_of(const ProductResult& product, int32_t turn) const {
    Params params{};
    params.x = x_.data();
    params.weight = matrix(product.shape, turn);
    params.out = out_.data();
    params.x_stride = params.weight_stride = product.shape.k;
    params.out_stride = product.shape.n;
    params.rows = product.rows;
    params.n = product.shape.n;
    params.k = product.shape.k;
    return params;
  }

  gpu::MatmulParams matmul(const ProductResult& product, int32_t turn) const {
    return params_of<gpu::MatmulParams>(product, turn);
  }
  cuda::SkinnyGemmParams skinny(const ProductResult& product, int32_t turn) const {
    return params_of<cuda::SkinnyGemmParams>(product, turn);
  }

  // Runs turn 0 over an output of NaN.
  std::vector<float> output(const GpuWork& work) const {
    gpu::fill_bytes(out_.data(), 0xff, out_.bytes(), stream());
    work(0, stream());
    std::vector<uint16_t> bits(out_.bytes() / 2);
    gpu::copy_to_host(bits.data(), out_.data(), out_.bytes(), stream());
    gpu::synchronize(stream());
    std::vector<float> values(bits.size());
    std::ranges::transform(bits, values.begin(), bf16_to_float);
    return values;
  }

  static double difference(const std::vector<float>& got, const std::vector<float>& want) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      error += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
      norm += double{want[i]} * want[i];
    }
    return std::sqrt(error / norm);
  }

  gpu::Context context_;
  gpu::OwnedStream stream_;
  MeasureKernels measure_;
  gpu::DeviceBuffer matrices_, x_, out_;
  cuda::SkinnyProducts skinny_;
  cuda::NarrowProducts narrow_;
  gpu::MatrixProducts cublaslt_;
  GpuCeilings ceilings_;
  int32_t sets_ = 1;
};

std::string microseconds(const std::optional<double>& seconds) {
  return seconds ? fmt::format("{:.2f}", *seconds * 1e6) : "-";
}

std::optional<double> best_seconds(const ProductResult& result) {
  std::optional<double> best = result.cublaslt_seconds;
  const auto add = [&](const std::optional<double>& seconds) {
    if (seconds && (!best || *seconds < *best)) best = seconds;
  };
  std::ranges::for_each(result.variant_seconds, add);
  std::ranges::for_each(result.division_seconds, add);
  return best;
}

// The cells of a row, in the order of header_cells().
std::vector<std::string> cells(const ProductResult& result) {
  std::vector<std::string> row = {std::to_string(result.shape.n), std::to_string(result.shape.k),
                                  std::to_string(result.rows), microseconds(result.floor_seconds),
                                  microseconds(result.cublaslt_seconds)};
  for (const auto& seconds : result.variant_seconds) row.push_back(microseconds(seconds));
  for (const auto& seconds : result.division_seconds) row.push_back(microseconds(seconds));
  row.push_back(microseconds(result.narrow_seconds));
  row.push_back(fmt::format("{:.3f}", result.floor_seconds / best_seconds(result).value_or(1)));
  row.push_back(fmt::format("{:.1e}", result.difference));
  return row;
}

std::vector<std::string> header_cells() {
  std::vector<std::string> row = {"n", "k", "rows", "floor_us", "cublaslt_us"};
  for (const std::string_view stages : cuda::SkinnyProducts::kStages) {
    row.push_back(fmt::format("{}_stages_us", stages));
  }
  for (const cuda::NarrowProducts::Division& division : cuda::NarrowProducts::kDivisions) {
    row.push_back(fmt::format("narrow_{}_{}_us", division.groups, division.splits));
  }
  row.push_back("narrow_us");
  row.push_back("best_share");
  row.push_back("difference");
  return row;
}

}  // namespace

std::vector<ProductResult> run_products(int device, std::span<const ProductShape> shapes,
                                        std::span<const int32_t> rows,
                                        const std::function<void(std::string_view)>& progress) {
  ProductBench bench(device, std::ranges::max(rows));
  std::vector<ProductResult> results;
  for (const ProductShape& shape : shapes) {
    for (const int32_t count : rows) {
      progress(fmt::format("{} rows times {} x {}", count, shape.n, shape.k));
      results.push_back(bench.run(shape, count));
    }
  }
  return results;
}

std::string format_products(std::span<const ProductResult> results, std::string_view output) {
  const std::vector<std::string> header = header_cells();
  std::string text;
  if (output == "json") {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const ProductResult& result : results) {
      nlohmann::ordered_json row;
      const std::vector<std::string> values = cells(result);
      for (size_t i = 0; i < header.size(); ++i) {
        row[header[i]] =
            values[i] == "-" ? nlohmann::ordered_json() : nlohmann::ordered_json::parse(values[i]);
      }
      rows.push_back(std::move(row));
    }
    return nlohmann::ordered_json{{"results", std::move(rows)}}.dump() + "\n";
  }
  const bool markdown = output == "md";
  const auto add = [&](const std::vector<std::string>& row) {
    text += markdown ? fmt::format("| {} |\n", fmt::join(row, " | "))
                     : fmt::format("{}\n", fmt::join(row, ","));
  };
  add(header);
  if (markdown) add(std::vector<std::string>(header.size(), "---:"));
  for (const ProductResult& result : results) add(cells(result));
  return text;
}

}  // namespace fovea::bench
