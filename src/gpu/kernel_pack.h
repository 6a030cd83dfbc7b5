// SPDX-License-Identifier: Apache-2.0
// Finds and stores the machine code of kernel variants. A variant comes from the kernel pack that
// ships with the library, or else from the disk cache, or else from the compiler. This happens when
// a backend is built, never inside forward().
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gpu/nvrtc.h"

namespace fovea::gpu {

// The headers of a program. Programs share one object, so that headers are hashed once: selecting a
// backend for a GPU looks up dozens of kernels.
class Headers {
 public:
  using Texts = std::vector<std::pair<std::string, std::string>>;  // text by the included name

  explicit Headers(Texts texts);

  const Texts& texts() const { return texts_; }
  // Returns the SHA-256 in hex over all names and tokens. Comments and layout do not count.
  const std::string& hash() const { return hash_; }

 private:
  Texts texts_;
  std::string hash_;
};

// Everything that determines a kernel's machine code.
struct KernelVariant {
  std::string name;                        // "sm90/attention/128_128_bf16_bf16"
  std::string program;                     // text of the translation unit
  std::string symbol;                      // extern "C" entry point
  std::shared_ptr<const Headers> headers;  // null if it includes nothing
  int sm = 90;  // 90 compiles for sm_90a, whose instructions only Hopper has
  // Flags besides the architecture. The assembler's report is parsed for resources and performance
  // losses.
  std::vector<std::string> flags = {"-std=c++20", "-default-device", "--ptxas-options=-v"};
};

struct CompiledKernel {
  std::string cubin;
  ResourceUse resources;
  double seconds = 0;  // compile time
};

// Returns the SHA-256 in hex over all of the variant except layout and comments of its headers. A
// pack entry with another hash is stale and ignored.
std::string content_hash(const KernelVariant& variant);

CompiledKernel compile(const KernelVariant& variant);

// A file of compiled variants, each compressed in memory as in the file. Entries are found by name
// and hash.
class KernelPack {
 public:
  // Throws Error{io} if the file does not exist, and Error{corrupt_file} describing any damage.
  static KernelPack open(const std::string& path);
  // Writes a temporary file, syncs it and renames it, so that readers see either the old or the new
  // file.
  void save(const std::string& path) const;

  const std::string& path() const { return path_; }  // empty if not read from a file
  size_t size() const { return entries_.size(); }
  void set(const KernelVariant& variant, const CompiledKernel& kernel);
  // Returns false if absent or stale.
  bool contains(const KernelVariant& variant) const { return entry_of(variant) != nullptr; }
  // Returns nullopt if absent or stale. Throws Error{corrupt_file} naming a damaged entry.
  std::optional<CompiledKernel> find(const KernelVariant& variant) const;
  // Drops all entries for which `keep` returns false.
  void retain_only(const std::function<bool(std::string_view name)>& keep);

 private:
  struct Entry {
    std::string hash;
    std::string frame;  // compressed cubin
    size_t cubin_bytes = 0;
    ResourceUse resources;
    double seconds = 0;
  };

  // Returns null if absent or stale.
  const Entry* entry_of(const KernelVariant& variant) const;

  std::string path_;  // empty if not read from a file
  std::map<std::string, Entry, std::less<>> entries_;
};

struct KernelStoreOptions {
  std::string pack_path;   // empty without a pack
  std::string cache_path;  // folder; empty disables the disk cache
  bool allow_compile = true;
  // Receives a line for each compiled variant, and for each failure of the cache folder, after
  // which kernels are compiled again.
  std::function<void(std::string_view line)> announce;
};

class KernelStore {
 public:
  explicit KernelStore(KernelStoreOptions options);

  // Throws Error{unsupported} if the variant is neither packed nor cached and cannot be compiled,
  // with the reason, and Error{corrupt_file} if its pack entry is damaged.
  CompiledKernel get(const KernelVariant& variant);
  // Returns the kernel if the pack or the cache has it.
  std::optional<CompiledKernel> find(const KernelVariant& variant) const;
  // Returns an empty string if get() will succeed, otherwise the reason. Neither compiles nor reads
  // the entry.
  std::string why_not(const KernelVariant& variant) const;

 private:
  std::string cache_file(const KernelVariant& variant) const;
  // Returns nullopt if the file is absent or damaged.
  std::optional<CompiledKernel> find_cached(const KernelVariant& variant) const;
  void keep_cached(const KernelVariant& variant, const CompiledKernel& kernel) const;
  std::string why_not_compiled(const KernelVariant& variant) const;
  void announce(const std::string& line) const;

  KernelStoreOptions options_;
  KernelPack pack_;
};

}  // namespace fovea::gpu
