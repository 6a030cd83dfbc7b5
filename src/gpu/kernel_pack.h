// SPDX-License-Identifier: Apache-2.0
// Machine code of kernel variants: where it comes from and how it is kept. A variant is looked for
// in the kernel pack that ships with the library, then in the disk cache, and is compiled
// otherwise; that happens when a backend is built, never inside forward().
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

// The headers of a program, hashed once for all programs that share them: a selection for a GPU
// asks for two dozen kernels.
class Headers {
 public:
  using Texts = std::vector<std::pair<std::string, std::string>>;  // name as included -> text

  explicit Headers(Texts texts);

  const Texts& texts() const { return texts_; }
  // SHA-256 in hex over the names and tokens of all of them; comments and layout do not count.
  const std::string& hash() const { return hash_; }

 private:
  Texts texts_;
  std::string hash_;
};

// One kernel to be: all that decides its machine code.
struct KernelVariant {
  std::string name;                        // "sm90/attention/128_128_bf16_bf16"
  std::string program;                     // text of the translation unit
  std::string symbol;                      // extern "C" entry point
  std::shared_ptr<const Headers> headers;  // null: it includes nothing
  int sm = 90;  // 90 compiles for sm_90a, whose instructions only Hopper has
  // Beside the architecture. The assembler's report is read for resources and losses.
  std::vector<std::string> flags = {"-std=c++20", "-default-device", "--ptxas-options=-v"};
};

struct CompiledKernel {
  std::string cubin;
  ResourceUse resources;
  double seconds = 0;  // it took to compile
};

// SHA-256 in hex over everything in the variant but the layout and comments of its headers. A pack
// entry with another hash is stale and not used.
std::string content_hash(const KernelVariant& variant);

CompiledKernel compile(const KernelVariant& variant);

// A file of compiled variants, compressed one by one, in memory as in the file. Entries are found
// by name and hash.
class KernelPack {
 public:
  // Error{io} where there is no such file, Error{corrupt_file} names what is wrong with it.
  static KernelPack open(const std::string& path);
  // Written to a temporary file, synced and renamed, so that a reader sees the old or the new one.
  void save(const std::string& path) const;

  const std::string& path() const { return path_; }  // of the file it was read from, or empty
  size_t size() const { return entries_.size(); }
  void set(const KernelVariant& variant, const CompiledKernel& kernel);
  // False when absent or stale.
  bool contains(const KernelVariant& variant) const { return entry_of(variant) != nullptr; }
  // Nothing when absent or stale; Error{corrupt_file} names an entry that is damaged. Takes 0.06 ms
  // for most kernels, 0.2 for the largest (0.37 MB).
  std::optional<CompiledKernel> find(const KernelVariant& variant) const;
  // Drops every entry `keep` is false for.
  void retain_only(const std::function<bool(std::string_view name)>& keep);

 private:
  struct Entry {
    std::string hash;
    std::string frame;  // the cubin, compressed
    size_t cubin_bytes = 0;
    ResourceUse resources;
    double seconds = 0;
  };

  // Null when absent or stale.
  const Entry* entry_of(const KernelVariant& variant) const;

  std::string path_;  // of the file it was read from; empty: none
  std::map<std::string, Entry, std::less<>> entries_;
};

struct KernelStoreOptions {
  std::string pack_path;   // empty: no pack
  std::string cache_path;  // folder; empty: nothing is cached on disk
  bool allow_compile = true;
  // One line for each variant compiled, and where the folder fails: kernels are then compiled anew.
  std::function<void(std::string_view line)> announce;
};

class KernelStore {
 public:
  explicit KernelStore(KernelStoreOptions options);

  // Error{unsupported} says that it is neither packed nor cached and why it cannot be compiled,
  // Error{corrupt_file} that its entry in the pack is damaged.
  CompiledKernel get(const KernelVariant& variant);
  // The same answer without compiling or looking into a pack's entry: empty when get() will work.
  std::string why_not(const KernelVariant& variant) const;

 private:
  std::string cache_file(const KernelVariant& variant) const;
  // Nothing where the file is absent or damaged.
  std::optional<CompiledKernel> find_cached(const KernelVariant& variant) const;
  void keep_cached(const KernelVariant& variant, const CompiledKernel& kernel) const;
  std::string why_not_compiled(const KernelVariant& variant) const;
  void announce(const std::string& line) const;

  KernelStoreOptions options_;
  KernelPack pack_;
};

}  // namespace fovea::gpu
