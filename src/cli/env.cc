// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "fovea/device.h"
#include "fovea/gpu.h"
#include "fovea/kernel_pack.h"
#include "fovea/version.h"

namespace fovea::cli {
namespace {

std::string describe_gpus() {
  std::string names;
  for (const DeviceInfo& gpu : gpu_devices()) {
    names += fmt::format("{}{} (sm_{}, {:.0f} GB)", names.empty() ? "" : ", ", gpu.name, gpu.sm,
                         static_cast<double>(gpu.memory_bytes) / 1e9);
  }
  return names.empty() ? why_no_gpu() : names;
}

nlohmann::ordered_json describe() {
  const DeviceInfo cpu = cpu_device();
  const KernelSources kernels = kernel_sources();
  return {
      {"fovea", FOVEA_VERSION},
      {"compiler", __VERSION__},
      {"processor", cpu.name},
      {"instruction_set", cpu.isa.empty() ? "none the cpu backend can use" : cpu.isa},
      {"cores", cpu.cores},
      {"memory_bytes", cpu.memory_bytes},
      {"gpu", describe_gpus()},
      {"kernel_pack", !kernels.why_no_pack.empty() ? kernels.why_no_pack
                      : kernels.pack_path.empty()  ? "none"
                                                   : kernels.pack_path},
      {"kernel_cache", kernels.cache_path.empty() ? "none" : kernels.cache_path},
      {"kernel_compiler", kernels.compiler.empty() ? kernels.why_no_compiler : kernels.compiler}};
}

}  // namespace

void add_env(CLI::App& program) {
  auto json = std::make_shared<bool>(false);
  CLI::App* command = program.add_subcommand("env", "show facts about this build and this machine");
  command->add_flag("--json", *json, "print the facts as JSON");
  command->callback([json] {
    const nlohmann::ordered_json facts = describe();
    if (*json) {
      fmt::print("{}\n", facts.dump(2));
      return;
    }
    for (const auto& [name, value] : facts.items()) {
      fmt::print("{:16} {}\n", name, value.is_string() ? value.get<std::string>() : value.dump());
    }
  });
}

}  // namespace fovea::cli
