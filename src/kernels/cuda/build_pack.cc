// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <filesystem>
#include <mutex>
#include <optional>
#include <set>

#include "core/check.h"
#include "fovea/kernel_pack.h"
#include "fovea/thread_pool.h"
#include "kernels/cuda/family.h"
#include "kernels/cuda/kernel_traits.h"

namespace fovea {
namespace {

using gpu::CompiledKernel;
using gpu::KernelPack;
using gpu::KernelVariant;

struct Baked {
  std::string family;
  KernelVariant variant;
};

std::vector<Baked> baked_set() {
  std::vector<Baked> variants;
  for (const kernels::cuda::Family& family : kernels::cuda::families()) {
    for (const kernels::cuda::VariantValues& values : family.baked) {
      for (const int sm : family.sms) {
        variants.push_back({family.folder, make_variant(family, values, sm)});
      }
    }
  }
  return variants;
}

// CUDA C Programming Guide, technical specifications per compute capability.
int shared_bytes_of_sm(int sm) {
  constexpr int kKilobyte = 1024;
  return (sm == 80 ? 164 : sm == 120 ? 100 : 228) * kKilobyte;
}

int blocks_per_sm(const KernelListing& kernel) {
  constexpr int kReservedShared = 1024;  // reserved in every block
  constexpr int kRegisters = 65536, kRegisterUnit = 8;
  const int threads_of_sm = kernel.sm == 120 ? 1536 : 2048;
  if (kernel.threads == 0) return 0;
  const int registers = (kernel.registers + kRegisterUnit - 1) / kRegisterUnit * kRegisterUnit;
  const int shared = kernel.shared_bytes + kernel.dynamic_shared_bytes + kReservedShared;
  return std::min({kRegisters / std::max(registers * kernel.threads, 1),
                   threads_of_sm / kernel.threads, shared_bytes_of_sm(kernel.sm) / shared, 32});
}

KernelListing describe(const Baked& baked, const KernelPack& pack) {
  const KernelVariant& variant = baked.variant;
  KernelListing listing{.name = variant.name, .family = baked.family, .sm = variant.sm};
  if (const std::optional<CompiledKernel> kernel = pack.find(variant)) {
    listing.packed = true;
    listing.cubin_bytes = kernel->cubin.size();
    listing.registers = kernel->resources.registers;
    listing.spill_bytes = kernel->resources.spill_bytes;
    listing.shared_bytes = kernel->resources.shared_bytes;
    listing.compile_seconds = kernel->seconds;
    listing.losses = kernel->resources.losses;
    const std::string name = fmt::format("{}: {}", pack.path(), variant.name);
    if (const auto traits = kernels::cuda::read_traits(kernel->cubin, name)) {
      listing.threads = traits->threads;
      listing.dynamic_shared_bytes = traits->shared_bytes;
    }
    listing.blocks_per_sm = blocks_per_sm(listing);
  }
  return listing;
}

}  // namespace

std::vector<KernelListing> build_kernel_pack(const KernelBuildOptions& options) {
  check_argument(!options.pack_path.empty(), "pack_path is empty");
  const std::vector<Baked> variants = baked_set();
  const auto wanted = [&](const Baked& baked) {
    return baked.variant.name.find(options.only) != std::string::npos;
  };
  check_argument(std::ranges::any_of(variants, wanted),
                 "only is '{}', which no kernel's name contains", options.only);
  KernelPack pack;
  if (std::filesystem::exists(options.pack_path)) pack = KernelPack::open(options.pack_path);
  std::set<std::string, std::less<>> names;
  std::vector<const KernelVariant*> missing;
  for (const Baked& baked : variants) {
    names.insert(baked.variant.name);
    if (wanted(baked) && !pack.contains(baked.variant)) missing.push_back(&baked.variant);
  }
  pack.retain_only([&](std::string_view name) { return names.contains(name); });

  pack.save(options.pack_path);  // a path that cannot be written is refused before the compiling
  ThreadPool threads(options.threads);
  std::mutex mutex;
  size_t done = 0;
  const auto compile = [&](int64_t index, int) {
    const KernelVariant& variant = *missing[static_cast<size_t>(index)];
    const CompiledKernel kernel = gpu::compile(variant);
    const std::lock_guard lock(mutex);
    pack.set(variant, kernel);
    ++done;
    if (options.progress) {
      options.progress(
          fmt::format("[{}/{}] {} {:.1f} s", done, missing.size(), variant.name, kernel.seconds));
    }
  };
  try {
    threads.parallel_for(static_cast<int64_t>(missing.size()), compile);
  } catch (...) {
    pack.save(options.pack_path);  // keeps the kernels that did compile
    throw;
  }
  pack.save(options.pack_path);

  std::vector<KernelListing> listings;
  for (const Baked& variant : variants) listings.push_back(describe(variant, pack));
  return listings;
}

std::vector<KernelListing> list_kernels(const std::string& pack_path) {
  const KernelPack pack = pack_path.empty() ? KernelPack() : KernelPack::open(pack_path);
  std::vector<KernelListing> listings;
  for (const Baked& variant : baked_set()) listings.push_back(describe(variant, pack));
  return listings;
}

}  // namespace fovea
