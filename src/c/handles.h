// SPDX-License-Identifier: Apache-2.0
// The objects behind handles. Each begins with a mark and its kind, so that a handle of another
// kind is refused. A handle shares what it was made from, so the order of destruction is free.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "c/arguments.h"
#include "fovea/engine.h"
#include "fovea/fovea.h"
#include "fovea/merge_states.h"
#include "fovea/pass_addresses.h"
#include "fovea/prefix_cache.h"
#include "fovea/select_backend.h"

namespace fovea::c {

enum class HandleKind : uint64_t {
  thread_pool,
  selection,
  request_table,
  page_allocator,
  kv_pool,
  state_pool,
  prefix_cache,
  backend,
  merger,
  pass_addresses,
  engine,
  results,
};

std::string_view name_of(HandleKind kind);

struct HandleMark {
  uint64_t magic;
  HandleKind kind;
};
inline constexpr uint64_t kHandleMagic = 0x6165766f'68616e64;

template <HandleKind kind>
struct Handle {
  static constexpr HandleKind kKind = kind;
  volatile uint64_t magic = kHandleMagic;
  volatile HandleKind own_kind = kind;

  Handle() = default;
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  // Makes a handle that is used after its destruction likely to be noticed.
  ~Handle() { magic = 0; }
};

void check_handle(const void* given, HandleKind kind, std::string_view name);

// Returns the object of a handle that the caller must give.
template <typename H>
H& need(H* given, std::string_view name) {
  check_handle(given, std::remove_const_t<H>::kKind, name);
  return *given;
}

// Returns null for a null handle.
template <typename H>
H* optional(H* given, std::string_view name) {
  return given == nullptr ? nullptr : &need(given, name);
}

// Gives the caller a new handle.
template <typename H>
void give_handle(std::unique_ptr<H> handle, H** out) {
  *out = handle.release();
}

// Checks the place for a new handle and clears it, so that it is null after a failure.
template <typename H>
void clear_handle(H** out, std::string_view name) {
  set(out, nullptr, name);
}

template <typename H>
fovea_status destroy_handle(H* given, std::string_view name) noexcept {
  return guarded([&] { delete optional(given, name); });
}

}  // namespace fovea::c

struct fovea_thread_pool : fovea::c::Handle<fovea::c::HandleKind::thread_pool> {
  std::shared_ptr<fovea::ThreadPool> object;
};

struct fovea_selection : fovea::c::Handle<fovea::c::HandleKind::selection> {
  std::shared_ptr<const void> owner;  // keeps the registry
  fovea::BackendRequest request;
  fovea::Selection object;
  std::string refusal;  // why no backend was chosen
};

struct fovea_request_table : fovea::c::Handle<fovea::c::HandleKind::request_table> {
  std::unique_ptr<fovea::RequestTable> object;
};

struct fovea_page_allocator : fovea::c::Handle<fovea::c::HandleKind::page_allocator> {
  std::shared_ptr<fovea::PageAllocator> object;
  std::vector<int64_t> taken;  // reserved, so that calls allocate no memory
};

struct fovea_kv_pool : fovea::c::Handle<fovea::c::HandleKind::kv_pool> {
  std::shared_ptr<fovea::KvPool> object;
  fovea::WindowKvPool* window = nullptr;  // the same object, if the library made a window pool
};

struct fovea_state_pool : fovea::c::Handle<fovea::c::HandleKind::state_pool> {
  std::shared_ptr<fovea::StatePool> object;
};

struct fovea_prefix_cache : fovea::c::Handle<fovea::c::HandleKind::prefix_cache> {
  std::shared_ptr<fovea::PageAllocator> pages;
  std::shared_ptr<fovea::StatePool> states;
  std::unique_ptr<fovea::PrefixCache> object;  // last: its destructor releases pages and states
};

struct fovea_backend : fovea::c::Handle<fovea::c::HandleKind::backend> {
  std::vector<std::shared_ptr<const void>> owners;  // pools, threads and parts
  std::shared_ptr<fovea::AttentionBackend> object;
  bool by_layer = false;                    // a composition by layer
  std::vector<fovea::AttentionSpec> specs;  // one; of a composition by layer one per layer
  fovea::BatchLimits limits;                // given to the last reserve
  int64_t planned_tokens = 0;

  const fovea::AttentionSpec& spec(int32_t layer) const;
};

struct fovea_merger : fovea::c::Handle<fovea::c::HandleKind::merger> {
  std::shared_ptr<fovea::ThreadPool> threads;
  fovea::StateShape shape;
  fovea::Device device;
  std::unique_ptr<fovea::StateMerger> object;
};

struct fovea_pass_addresses : fovea::c::Handle<fovea::c::HandleKind::pass_addresses> {
  fovea::PassAddresses object;
};

struct fovea_engine : fovea::c::Handle<fovea::c::HandleKind::engine> {
  std::shared_ptr<fovea::Engine> object;
  bool running = false;  // a step or a generation is calling back
};

struct fovea_results : fovea::c::Handle<fovea::c::HandleKind::results> {
  std::vector<fovea::GenerateResult> object;
};
