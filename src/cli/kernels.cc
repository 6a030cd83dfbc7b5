// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "cli/commands.h"
#include "cli/interrupt.h"
#include "fovea/kernel_pack.h"

namespace fovea::cli {
namespace {

void print_json(const std::vector<KernelListing>& listings) {
  nlohmann::ordered_json report = nlohmann::ordered_json::array();
  for (const KernelListing& kernel : listings) {
    report.push_back({{"name", kernel.name},
                      {"family", kernel.family},
                      {"sm", kernel.sm},
                      {"packed", kernel.packed},
                      {"cubin_bytes", kernel.cubin_bytes},
                      {"registers", kernel.registers},
                      {"spill_bytes", kernel.spill_bytes},
                      {"shared_bytes", kernel.shared_bytes},
                      {"dynamic_shared_bytes", kernel.dynamic_shared_bytes},
                      {"threads", kernel.threads},
                      {"blocks_per_sm", kernel.blocks_per_sm},
                      {"compile_seconds", kernel.compile_seconds},
                      {"losses", kernel.losses}});
  }
  fmt::print("{}\n", report.dump(2));
}

// Returns a line for each defect that no released kernel may have: spilled registers, and matrix
// products serialised by the assembler.
std::string defects(const std::vector<KernelListing>& listings) {
  std::string lines;
  for (const KernelListing& kernel : listings) {
    if (kernel.spill_bytes > 0) {
      lines += fmt::format("{} spills {} bytes\n", kernel.name, kernel.spill_bytes);
    }
    if (!kernel.losses.empty()) lines += fmt::format("{}: {}\n", kernel.name, kernel.losses);
  }
  return lines;
}

// Prints the names of the baked set, and marks those in the pack.
void print_names(const std::vector<KernelListing>& listings) {
  fmt::print("| kernel | in the pack |\n| --- | --- |\n");
  for (const KernelListing& kernel : listings) {
    fmt::print("| {} | {} |\n", kernel.name, kernel.packed ? "yes" : "no");
  }
}

// Prints the SM resources of each packed kernel, then totals per family.
void print_report(const std::vector<KernelListing>& listings) {
  struct Family {
    int kernels = 0, registers = 0, spill_bytes = 0;
    size_t bytes = 0;
    double seconds = 0;
  };
  std::map<std::string, Family> families;
  fmt::print(
      "| kernel | registers | spilled bytes | threads | shared bytes | blocks per SM | kB of code "
      "| compile s |\n"
      "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n");
  for (const KernelListing& kernel : listings) {
    if (!kernel.packed) continue;
    fmt::print("| {} | {} | {} | {} | {} | {} | {:.0f} | {:.1f} |\n", kernel.name, kernel.registers,
               kernel.spill_bytes, kernel.threads,
               kernel.shared_bytes + kernel.dynamic_shared_bytes, kernel.blocks_per_sm,
               static_cast<double>(kernel.cubin_bytes) / 1e3, kernel.compile_seconds);
    Family& family = families[kernel.family];
    ++family.kernels;
    family.registers = std::max(family.registers, kernel.registers);
    family.spill_bytes += kernel.spill_bytes;
    family.bytes += kernel.cubin_bytes;
    family.seconds += kernel.compile_seconds;
  }
  fmt::print(
      "\n| family | kernels | max registers | spilled bytes | MB of code | compile s |\n"
      "| --- | ---: | ---: | ---: | ---: | ---: |\n");
  Family all;
  const auto line = [](const std::string& name, const Family& family) {
    fmt::print("| {} | {} | {} | {} | {:.1f} | {:.1f} |\n", name, family.kernels, family.registers,
               family.spill_bytes, static_cast<double>(family.bytes) / 1e6, family.seconds);
  };
  for (const auto& [name, family] : families) {
    line(name, family);
    all.kernels += family.kernels;
    all.registers = std::max(all.registers, family.registers);
    all.spill_bytes += family.spill_bytes;
    all.bytes += family.bytes;
    all.seconds += family.seconds;
  }
  line("all", all);
  fmt::print("\n{} of {} kernels are in the pack\n", all.kernels, listings.size());
  fmt::print("{}", defects(listings));
}

struct KernelFlags {
  KernelBuildOptions build;
  // For list and report; default: the pack that programs on this machine load.
  std::optional<std::string> pack;
  bool json = false;
};

std::vector<KernelListing> listed(const KernelFlags& flags) {
  return list_kernels(flags.pack ? *flags.pack : kernel_sources().pack_path);
}

// Prints the progress of a build that takes minutes. On a terminal, each line overwrites the
// previous one. Elsewhere, prints separate lines for the first kernel, every couple of seconds, and
// the last kernel.
class BuildProgress {
 public:
  void show(std::string_view compiled) {
    if (isatty(STDERR_FILENO)) return show_progress(compiled);
    const auto now = std::chrono::steady_clock::now();
    unprinted_ = compiled;
    if (printed_ && now - *printed_ < kBetweenLines) return;
    printed_ = now;
    finish();
  }
  void finish() {
    clear_progress();
    if (!unprinted_.empty()) print_note(unprinted_ + "\n");
    unprinted_.clear();
  }

 private:
  static constexpr std::chrono::seconds kBetweenLines{5};

  std::optional<std::chrono::steady_clock::time_point> printed_;
  std::string unprinted_;
};

struct Interrupted {};

std::vector<KernelListing> build_pack(KernelBuildOptions options) {
  const InterruptCatcher catcher;
  BuildProgress progress;
  options.progress = [&](std::string_view compiled) {
    progress.show(compiled);
    if (InterruptCatcher::caught() != 0) throw Interrupted();
  };
  try {
    std::vector<KernelListing> listings = build_kernel_pack(options);
    progress.finish();
    return listings;
  } catch (const Interrupted&) {
    progress.finish();
    end_if_interrupted();
    throw;
  }
}

void build(const KernelFlags& flags) {
  const std::vector<KernelListing> listings = build_pack(flags.build);
  flags.json ? print_json(listings) : print_report(listings);
  const std::string found = defects(listings);
  if (found.empty()) return;
  print_note(fmt::format("fovea: kernels are slower than they could be:\n{}", found));
  throw CLI::RuntimeError(1);
}

}  // namespace

void add_kernels(CLI::App& program) {
  auto flags = std::make_shared<KernelFlags>();
  CLI::App* command =
      program.add_subcommand("kernels", "list, report or build the precompiled GPU kernels");
  command->require_subcommand(1);
  const auto add_listing = [&](const char* name, const char* what, auto* print_table) {
    CLI::App* listing = command->add_subcommand(name, what);
    listing
        ->add_option("--pack", flags->pack,
                     "kernel pack; default: the pack that programs on this machine load")
        ->check(CLI::ExistingFile);
    listing->add_flag("--json", flags->json, "print a JSON object per kernel");
    listing->callback([flags, print_table] {
      const std::vector<KernelListing> listings = listed(*flags);
      flags->json ? print_json(listings) : print_table(listings);
    });
  };
  add_listing("list", "list the baked set and mark the kernels in a pack", print_names);
  add_listing(
      "report",
      "print registers, spills, shared memory, blocks per SM, size and performance losses of "
      "every packed kernel",
      print_report);

  CLI::App* compile = command->add_subcommand(
      "build",
      "compile the kernels missing from a pack; the exit code is 1 if a kernel spills registers "
      "or the assembler serialises its products (wgmma)");
  compile->add_option("--pack", flags->build.pack_path, "kernel pack to write")->required();
  compile->add_option("--only", flags->build.only, "only kernels whose name contains this");
  compile->add_option("--threads", flags->build.threads, "default one per core");
  compile->add_flag("--json", flags->json, "print a JSON object per kernel");
  compile->footer(
      "Progress goes to stderr. SIGINT (Ctrl-C) and SIGTERM end the build after the current\n"
      "kernels, which the pack keeps. A second signal ends the program at once.");
  compile->callback([flags] { build(*flags); });
}

}  // namespace fovea::cli
