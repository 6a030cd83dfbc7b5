// SPDX-License-Identifier: Apache-2.0
// The command `bench products`.
#include <fmt/core.h>

#include <charconv>
#include <memory>
#include <string>
#include <vector>

#include "bench/gpu_products.h"
#include "cli/bench_gpu.h"
#include "cli/commands.h"
#include "fovea/error.h"
#include "fovea/gpu.h"

namespace fovea::cli {
namespace {

struct ProductFlags {
  std::string device = "cuda";
  std::string output = "md";
  // The matrices of Qwen3-8B: qkv, out, gate and up, down, head.
  std::vector<std::string> shapes = {"6144x4096", "4096x4096", "24576x4096", "4096x12288",
                                     "151936x4096"};
  std::vector<int32_t> rows = {1, 2, 4, 8, 16, 32, 64};
};

// Returns a problem with a shape "NxK", or an empty string.
std::string parse_shape(const std::string& text, bench::ProductShape& shape) {
  const char* const end = text.data() + text.size();
  const auto [middle, error] = std::from_chars(text.data(), end, shape.n);
  if (error == std::errc() && middle != end && *middle == 'x') {
    const auto [rest, second] = std::from_chars(middle + 1, end, shape.k);
    constexpr int32_t kMax = 1 << 20;
    const auto fits = [](int32_t size) { return size >= 1 && size <= kMax; };
    if (second == std::errc() && rest == end && fits(shape.n) && fits(shape.k)) return {};
  }
  return fmt::format("'{}' must be a shape like 4096x12288, each at most 2^20", text);
}

void run(const ProductFlags& flags) {
  const DeviceInfo device = find_device(flags.device);
  if (device.kind != DeviceKind::cuda) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--device is '{}', accepted: cuda, cuda:N", flags.device));
  }
  std::vector<bench::ProductShape> shapes(flags.shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) (void)parse_shape(flags.shapes[i], shapes[i]);
  const auto results = bench::run_products(device.index, shapes, flags.rows, show_progress);
  clear_progress();
  fmt::print("{}", bench::format_products(results, flags.output));
}

}  // namespace

void add_bench_products(CLI::App& bench) {
  auto flags = std::make_shared<ProductFlags>();
  CLI::App* command = bench.add_subcommand(
      "products", "measure products of a few rows with a model's matrices, on a GPU");
  command->add_option("--device", flags->device, "cuda or cuda:N")->capture_default_str();
  const CLI::Validator shape(
      [](const std::string& text) {
        bench::ProductShape parsed;
        return parse_shape(text, parsed);
      },
      "");
  add_comma_list(*command, "--shapes", flags->shapes,
                 "matrices as output x input size; default those of Qwen3-8B", shape);
  CLI::Validator positive = CLI::Range(1, 1 << 14);
  positive.description("");
  add_comma_list(*command, "--rows", flags->rows, "numbers of rows; default 1 to 64", positive);
  command->add_option("--output,-o", flags->output, "md, csv or json")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "csv", "json"}));
  command->callback([flags] { run(*flags); });
}

}  // namespace fovea::cli
