// SPDX-License-Identifier: Apache-2.0
#include "gpu/kernel_pack.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <random>

#include "core/check.h"
#include "core/compression.h"
#include "core/mapped_file.h"
#include "core/quote.h"
#include "core/sha256.h"
#include "gpu/pack_index.h"
#include "gpu/source_tokens.h"

namespace fovea::gpu {
namespace {

// A file consists of a magic, whose last character is the version; the length of the index (8
// bytes, little-endian); the index (pack_index.h); and the compressed cubins, each one frame.
constexpr std::string_view kMagic = "FOVEAPK3";

// Adds a field with its length, so that no two lists of fields give equal input.
void add_field(Sha256& sha, std::string_view field) {
  const uint64_t size = field.size();
  sha.update(&size, sizeof(size)).update(field.data(), field.size());
}

std::string to_hex(const Sha256::Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

std::vector<std::string> compiler_flags(const KernelVariant& variant) {
  std::vector<std::string> flags = {
      fmt::format("--gpu-architecture=sm_{}{}", variant.sm, variant.sm == 90 ? "a" : "")};
  flags.insert(flags.end(), variant.flags.begin(), variant.flags.end());
  return flags;
}

// Writes beyond a file size limit end the process by a signal. While this object lives, they fail
// with EFBIG on the calling thread instead.
class FileSizeSignalHeld {
 public:
  FileSizeSignalHeld() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
  }
  ~FileSizeSignalHeld() {
    const int why = errno;
    if (sigismember(&before_, SIGXFSZ) == 1) return;
    const timespec at_once{};
    while (sigtimedwait(&signal_, nullptr, &at_once) == SIGXFSZ) continue;
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = why;
  }
  FileSizeSignalHeld(const FileSizeSignalHeld&) = delete;
  FileSizeSignalHeld& operator=(const FileSizeSignalHeld&) = delete;

 private:
  sigset_t signal_, before_;
};

bool write_all(int file, std::string_view bytes) {
  const FileSizeSignalHeld held;
  while (!bytes.empty()) {
    const ssize_t written = ::write(file, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return ::fsync(file) == 0;
}

// The temporary name is unique across threads, and across containers in which processes have equal
// ids.
void replace_file(const std::string& path, std::string_view bytes) {
  std::random_device random;
  const std::string temporary = fmt::format("{}.{:08x}{:08x}", path, random(), random());
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  const bool done =
      file >= 0 && write_all(file, bytes) && ::rename(temporary.c_str(), path.c_str()) == 0;
  const int why = errno;
  if (file >= 0) ::close(file);
  if (done) return;
  ::unlink(temporary.c_str());
  fail(ErrorCode::io, "{}: cannot write: {}", path, std::strerror(why));
}

}  // namespace

Headers::Headers(Texts texts) : texts_(std::move(texts)) {
  Sha256 sha;
  for (const auto& [name, text] : texts_) {
    add_field(sha, name);
    add_field(sha, source_tokens(text));
  }
  hash_ = to_hex(sha.finish());
}

std::string content_hash(const KernelVariant& variant) {
  Sha256 sha;
  const std::vector<std::string> flags = compiler_flags(variant);
  add_field(sha, std::to_string(flags.size()));
  for (const std::string& flag : flags) add_field(sha, flag);
  add_field(sha, variant.symbol);
  add_field(sha, variant.program);
  if (variant.headers) add_field(sha, variant.headers->hash());
  return to_hex(sha.finish());
}

CompiledKernel compile(const KernelVariant& variant) {
  CompileOutput output =
      compile(CompileInput{.program = variant.program,
                           .name = variant.name,
                           .headers = variant.headers ? variant.headers->texts() : Headers::Texts(),
                           .flags = compiler_flags(variant)});
  CompiledKernel kernel;
  kernel.resources = parse_resource_use(output.log, variant.symbol);
  kernel.cubin = std::move(output.cubin);
  kernel.seconds = output.seconds;
  return kernel;
}

KernelPack KernelPack::open(const std::string& path) {
  const MappedFile file(path);
  const std::string_view bytes = file.text();
  const size_t fixed = kMagic.size() + 8;
  if (bytes.size() < fixed || !bytes.starts_with(kMagic.substr(0, kMagic.size() - 1))) {
    fail(ErrorCode::corrupt_file, "{}: not a kernel pack", path);
  }
  if (!bytes.starts_with(kMagic)) {
    fail(ErrorCode::corrupt_file, "{}: a kernel pack of version {}, must be {}: build it anew",
         path, quote(bytes.substr(kMagic.size() - 1, 1)), quote(kMagic.substr(kMagic.size() - 1)));
  }
  uint64_t index_bytes = 0;
  std::memcpy(&index_bytes, bytes.data() + kMagic.size(), 8);
  if (index_bytes > bytes.size() - fixed) {
    fail(ErrorCode::corrupt_file, "{}: the index has {} bytes, {} are there", path, index_bytes,
         bytes.size() - fixed);
  }
  const std::string_view frames = bytes.substr(fixed + index_bytes);
  KernelPack pack;
  pack.path_ = path;
  uint64_t taken = 0;  // bounds the memory, since entries may share bytes
  for (const PackIndexEntry& item : parse_pack_index(path, bytes.substr(fixed, index_bytes))) {
    if (item.offset > frames.size() || item.frame_bytes > frames.size() - item.offset) {
      fail(ErrorCode::corrupt_file, "{}: {} lies outside the file", path, item.name);
    }
    taken += item.frame_bytes;
    if (taken > frames.size()) {
      fail(ErrorCode::corrupt_file, "{}: entries up to {} have {} bytes, {} are there", path,
           item.name, taken, frames.size());
    }
    pack.entries_[item.name] = {.hash = item.hash,
                                .frame = std::string(frames.substr(item.offset, item.frame_bytes)),
                                .cubin_bytes = item.cubin_bytes,
                                .resources = item.resources,
                                .seconds = item.seconds};
  }
  return pack;
}

void KernelPack::save(const std::string& path) const {
  std::string index, frames;
  for (const auto& [name, entry] : entries_) {
    index += pack_index_line({.name = name,
                              .hash = entry.hash,
                              .offset = frames.size(),
                              .frame_bytes = entry.frame.size(),
                              .cubin_bytes = entry.cubin_bytes,
                              .seconds = entry.seconds,
                              .resources = entry.resources});
    frames += entry.frame;
  }
  const uint64_t size = index.size();
  std::string bytes(kMagic);
  bytes.append(reinterpret_cast<const char*>(&size), sizeof(size));
  replace_file(path, bytes + index + frames);
}

void KernelPack::set(const KernelVariant& variant, const CompiledKernel& kernel) {
  entries_[variant.name] = {.hash = content_hash(variant),
                            .frame = compress(kernel.cubin),
                            .cubin_bytes = kernel.cubin.size(),
                            .resources = kernel.resources,
                            .seconds = kernel.seconds};
}

const KernelPack::Entry* KernelPack::entry_of(const KernelVariant& variant) const {
  const auto found = entries_.find(variant.name);
  if (found == entries_.end() || found->second.hash != content_hash(variant)) return nullptr;
  return &found->second;
}

std::optional<CompiledKernel> KernelPack::find(const KernelVariant& variant) const {
  const Entry* entry = entry_of(variant);
  if (!entry) return std::nullopt;
  return CompiledKernel{.cubin = decompress(entry->frame, entry->cubin_bytes,
                                            fmt::format("{}: {}", path_, variant.name)),
                        .resources = entry->resources,
                        .seconds = entry->seconds};
}

void KernelPack::retain_only(const std::function<bool(std::string_view)>& keep) {
  std::erase_if(entries_, [&](const auto& item) { return !keep(item.first); });
}

KernelStore::KernelStore(KernelStoreOptions options) : options_(std::move(options)) {
  if (!options_.pack_path.empty()) pack_ = KernelPack::open(options_.pack_path);
}

// Each cache file is a pack with one entry. Its name contains the compiler's version.
std::string KernelStore::cache_file(const KernelVariant& variant) const {
  return fmt::format("{}/{}-nvrtc{}.pack", options_.cache_path, content_hash(variant),
                     nvrtc_version());
}

std::optional<CompiledKernel> KernelStore::find_cached(const KernelVariant& variant) const {
  if (options_.cache_path.empty()) return std::nullopt;
  const std::string file = cache_file(variant);
  std::error_code ignored;
  if (!std::filesystem::exists(file, ignored)) return std::nullopt;
  try {
    return KernelPack::open(file).find(variant);
  } catch (const Error& error) {
    announce(fmt::format("the kernel cache is damaged: {}", error.what()));
  }
  return std::nullopt;
}

void KernelStore::keep_cached(const KernelVariant& variant, const CompiledKernel& kernel) const {
  if (options_.cache_path.empty()) return;
  KernelPack one;
  one.set(variant, kernel);
  std::error_code problem;
  std::filesystem::create_directories(options_.cache_path, problem);
  try {
    one.save(cache_file(variant));
  } catch (const Error& error) {
    announce(fmt::format("the kernel is not cached: {}", error.what()));
  }
}

void KernelStore::announce(const std::string& line) const {
  if (options_.announce) options_.announce(line);
}

std::string KernelStore::why_not(const KernelVariant& variant) const {
  if (pack_.contains(variant) || find_cached(variant)) return {};
  return why_not_compiled(variant);
}

std::string KernelStore::why_not_compiled(const KernelVariant& variant) const {
  const std::string missing =
      fmt::format("{} for sm_{} is not in the kernel pack", variant.name, variant.sm);
  if (!options_.allow_compile) return missing + " and compiling at run time is forbidden";
  if (!why_no_nvrtc().empty())
    return fmt::format("{} and cannot be compiled: {}", missing, why_no_nvrtc());
  return {};
}

std::optional<CompiledKernel> KernelStore::find(const KernelVariant& variant) const {
  if (auto packed = pack_.find(variant)) return packed;
  return find_cached(variant);
}

CompiledKernel KernelStore::get(const KernelVariant& variant) {
  if (auto found = find(variant)) return *std::move(found);
  if (const std::string reason = why_not_compiled(variant); !reason.empty()) {
    fail(ErrorCode::unsupported, "{}", reason);
  }
  announce(
      fmt::format("compiling {} for sm_{} (not in the kernel pack)", variant.name, variant.sm));
  CompiledKernel kernel = compile(variant);
  keep_cached(variant, kernel);
  return kernel;
}

}  // namespace fovea::gpu
