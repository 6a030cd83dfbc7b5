// SPDX-License-Identifier: Apache-2.0
#include <filesystem>
#include <mutex>
#include <set>

#include "core/check.h"
#include "fovea/kernel_pack.h"
#include "fovea/thread_pool.h"
#include "kernels/cuda/family.h"

namespace fovea {
namespace {

using gpu::CompiledKernel;
using gpu::KernelPack;
using gpu::KernelVariant;

std::vector<KernelVariant> baked_set() {
  std::vector<KernelVariant> variants;
  for (const kernels::cuda::Family& family : kernels::cuda::families()) {
    for (const kernels::cuda::VariantValues& values : family.baked) {
      for (const int sm : family.sms) variants.push_back(make_variant(family, values, sm));
    }
  }
  return variants;
}

KernelPack open_or_empty(const std::string& path) {
  return path.empty() || !std::filesystem::exists(path) ? KernelPack() : KernelPack::open(path);
}

KernelListing describe(const KernelVariant& variant, const KernelPack& pack) {
  KernelListing listing{.name = variant.name};
  if (const CompiledKernel* kernel = pack.find(variant)) {
    listing.packed = true;
    listing.cubin_bytes = kernel->cubin.size();
    listing.registers = kernel->resources.registers;
    listing.spill_bytes = kernel->resources.spill_bytes;
    listing.shared_bytes = kernel->resources.shared_bytes;
    listing.compile_seconds = kernel->seconds;
  }
  return listing;
}

}  // namespace

std::vector<KernelListing> build_kernel_pack(const KernelBuildOptions& options) {
  check_argument(!options.pack_path.empty(), "pack_path is empty");
  const std::vector<KernelVariant> variants = baked_set();
  KernelPack pack = open_or_empty(options.pack_path);
  std::set<std::string, std::less<>> names;
  std::vector<const KernelVariant*> missing;
  for (const KernelVariant& variant : variants) {
    names.insert(variant.name);
    const bool wanted = variant.name.find(options.only) != std::string::npos;
    if (wanted && !pack.find(variant)) missing.push_back(&variant);
  }
  pack.retain_only([&](std::string_view name) { return names.contains(name); });

  ThreadPool threads(options.threads);
  std::mutex mutex;
  size_t done = 0;
  threads.parallel_for(static_cast<int64_t>(missing.size()), [&](int64_t index, int) {
    const KernelVariant& variant = *missing[static_cast<size_t>(index)];
    CompiledKernel kernel = gpu::compile(variant);
    const std::lock_guard lock(mutex);
    ++done;
    if (options.progress) {
      options.progress(
          fmt::format("[{}/{}] {} {:.1f} s", done, missing.size(), variant.name, kernel.seconds));
    }
    pack.set(variant, std::move(kernel));
  });
  pack.save(options.pack_path);

  std::vector<KernelListing> listings;
  for (const KernelVariant& variant : variants) listings.push_back(describe(variant, pack));
  return listings;
}

std::vector<KernelListing> list_kernels(const std::string& pack_path) {
  const KernelPack pack = open_or_empty(pack_path);
  std::vector<KernelListing> listings;
  for (const KernelVariant& variant : baked_set()) listings.push_back(describe(variant, pack));
  return listings;
}

}  // namespace fovea
