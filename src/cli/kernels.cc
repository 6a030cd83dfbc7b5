// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "fovea/kernel_pack.h"

namespace fovea::cli {
namespace {

void print(const std::vector<KernelListing>& listings, bool json) {
  if (json) {
    nlohmann::ordered_json report = nlohmann::ordered_json::array();
    for (const KernelListing& kernel : listings) {
      report.push_back({{"name", kernel.name},
                        {"packed", kernel.packed},
                        {"cubin_bytes", kernel.cubin_bytes},
                        {"registers", kernel.registers},
                        {"spill_bytes", kernel.spill_bytes},
                        {"shared_bytes", kernel.shared_bytes},
                        {"compile_seconds", kernel.compile_seconds}});
    }
    fmt::print("{}\n", report.dump(2));
    return;
  }
  fmt::print(
      "| kernel | in the pack | registers | spilled bytes | static shared bytes | kB | compile s "
      "|\n"
      "| --- | --- | ---: | ---: | ---: | ---: | ---: |\n");
  size_t bytes = 0;
  for (const KernelListing& kernel : listings) {
    bytes += kernel.cubin_bytes;
    if (!kernel.packed) {
      fmt::print("| {} | no | | | | | |\n", kernel.name);
      continue;
    }
    fmt::print("| {} | yes | {} | {} | {} | {:.0f} | {:.1f} |\n", kernel.name, kernel.registers,
               kernel.spill_bytes, kernel.shared_bytes,
               static_cast<double>(kernel.cubin_bytes) / 1e3, kernel.compile_seconds);
  }
  fmt::print("\n{} kernels, {:.1f} MB\n", listings.size(), static_cast<double>(bytes) / 1e6);
}

struct KernelFlags {
  KernelBuildOptions build;
  bool json = false;
};

void build(const KernelFlags& flags) {
  KernelBuildOptions options = flags.build;
  options.progress = show_progress;
  const std::vector<KernelListing> listings = build_kernel_pack(options);
  clear_progress();
  print(listings, flags.json);
  for (const KernelListing& kernel : listings) {
    if (kernel.spill_bytes == 0) continue;
    fmt::print(stderr, "fovea: {} spills {} bytes\n", kernel.name, kernel.spill_bytes);
    throw CLI::RuntimeError(1);
  }
}

}  // namespace

void add_kernels(CLI::App& program) {
  auto flags = std::make_shared<KernelFlags>();
  CLI::App* command = program.add_subcommand("kernels", "the GPU kernels that ship compiled");
  command->require_subcommand(1);
  CLI::App* list = command->add_subcommand("list", "the baked set and what a pack has of it");
  list->add_option("--pack", flags->build.pack_path, "kernel pack");
  list->add_flag("--json", flags->json);
  list->callback([flags] { print(list_kernels(flags->build.pack_path), flags->json); });

  CLI::App* compile = command->add_subcommand(
      "build", "compile what a pack lacks; exit code 1 when a kernel spills registers");
  compile->add_option("--pack", flags->build.pack_path, "kernel pack to write")->required();
  compile->add_option("--only", flags->build.only, "only kernels whose name contains this");
  compile->add_option("--threads", flags->build.threads, "default one per core");
  compile->add_flag("--json", flags->json);
  compile->callback([flags] { build(*flags); });
}

}  // namespace fovea::cli
