// SPDX-License-Identifier: Apache-2.0
#include "core/bus_errors.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

namespace fovea {

// A handler may interrupt any code, so it reads atomics only and takes no lock. Mappings are never
// deleted, only reused.
struct Mapping {
  std::atomic<uintptr_t> begin{0};  // 0 if not watched
  std::atomic<size_t> bytes{0};
  std::atomic<bool> is_damaged{false};
  bool is_taken = false;  // guarded by the mutex
  Mapping* next = nullptr;
};

namespace {

static_assert(std::atomic<uintptr_t>::is_always_lock_free &&
              std::atomic<size_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
              std::atomic<Mapping*>::is_always_lock_free);

std::atomic<Mapping*> first_mapping{nullptr};
std::mutex mappings_mutex;
struct sigaction previous_action = {};
uintptr_t page_bytes = 4096;

Mapping* mapping_of(uintptr_t address) {
  for (Mapping* mapping = first_mapping.load(); mapping != nullptr; mapping = mapping->next) {
    const uintptr_t begin = mapping->begin.load();
    if (begin != 0 && address >= begin && address - begin < mapping->bytes.load()) return mapping;
  }
  return nullptr;
}

// Puts zeros in place of the pages from `address` to the end of the mapping.
bool replace_pages(const Mapping& mapping, uintptr_t address) {
  const uintptr_t page = address & ~(page_bytes - 1);
  const size_t bytes = mapping.bytes.load() - (page - mapping.begin.load());
  void* const place = reinterpret_cast<void*>(page);
  return ::mmap(place, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == place;
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if ((previous_action.sa_flags & SA_SIGINFO) != 0) {
    previous_action.sa_sigaction(signal, info, context);
  } else if (previous_action.sa_handler != SIG_DFL && previous_action.sa_handler != SIG_IGN) {
    previous_action.sa_handler(signal);
  } else if (previous_action.sa_handler == SIG_DFL || info->si_code > 0) {
    // After the handler returns, a failed access fails again and ends the process. A signal that
    // another process sent must be sent again.
    ::signal(signal, SIG_DFL);
    if (info->si_code <= 0) ::raise(signal);
  }
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  // A positive code means that the kernel reports an access of this process.
  Mapping* const mapping = info->si_code > 0 ? mapping_of(address) : nullptr;
  if (mapping != nullptr && replace_pages(*mapping, address)) {
    mapping->is_damaged.store(true);
  } else {
    pass_on(signal, info, context);
  }
  errno = error;
}

void install() {
  page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action = {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGBUS, &action, &previous_action);
}

}  // namespace

Mapping* take_mapping() {
  const std::lock_guard lock(mappings_mutex);
  static const bool is_installed = (install(), true);
  (void)is_installed;
  for (Mapping* mapping = first_mapping.load(); mapping != nullptr; mapping = mapping->next) {
    if (mapping->is_taken) continue;
    mapping->is_taken = true;
    mapping->is_damaged.store(false);
    return mapping;
  }
  auto* const mapping = new Mapping;
  mapping->is_taken = true;
  mapping->next = first_mapping.load();
  first_mapping.store(mapping);
  return mapping;
}

void watch(Mapping* mapping, const std::byte* begin, size_t bytes) noexcept {
  mapping->bytes.store(bytes);
  mapping->begin.store(reinterpret_cast<uintptr_t>(begin));
}

bool is_damaged(const Mapping* mapping) noexcept { return mapping->is_damaged.load(); }

void release_mapping(Mapping* mapping) noexcept {
  mapping->begin.store(0);
  const std::lock_guard lock(mappings_mutex);
  mapping->is_taken = false;
}

}  // namespace fovea
