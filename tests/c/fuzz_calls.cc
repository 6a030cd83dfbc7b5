// SPDX-License-Identifier: Apache-2.0
#include "c/fuzz_calls.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <vector>

#include "c/fuzz_values.h"
#include "c/small_world.h"

namespace fovea::test {
namespace {

// Words that name an argument in messages: parameters, fields, and what handles hold.
constexpr std::string_view kArguments[] = {
    "spec",      "limits", "request",   "batch",     "layer",   "table",   "slots",     "pages",
    "page",      "mode",   "tokens",    "q_indptr",  "kv_len",  "rows",    "row",       "out",
    "positions", "masks",  "cross",     "linear",    "hints",   "entry",   "q ",        "k ",
    "v ",        "lse",    "sinks",     "rotary",    "mla",     "dual",    "q:",        "k:",
    "v:",        "alibi",  "q_scale",   "save_kv",   "backend", "handle",  "fovea_",    "threads",
    "kv",        "states", "pool",      "workspace", "device",  "dtype",   "heads",     "head_dim",
    "kind",      "scope",  "mask",      "window",    "chunk",   "scale",   "layout",    "order",
    "max_",      "prefix", "slot",      "size",      "stride",  "columns", "conv",      "bytes",
    "verify",    "phase",  "text",      "name",      "count",   "index",   "length",    "has_rope",
    "needs_lse", "logit",  "budget",    "reserved",  "plan",    "now",     "addresses", "merger",
    "into",      "part",   "selection", "prefill",   "decode",  "first",   "state",     "cache",
    "key_",      "value_", "rope_dim",  "nope_dim",  "v_dim"};

class Caller {
 public:
  Caller(SmallWorld& world, FuzzBytes& bytes) : world_(world), bytes_(bytes) {}

  fovea_status call() {
    world_.reset();
    switch (bytes_.next() % 8) {
      case 0:
      case 1:
      case 2:
        return run_pass();
      case 3:
        return with_spec();
      case 4:
        return with_cache();
      case 5:
        return with_limits();
      case 6:
        return bytes_.next() % 2 == 0 ? with_tables() : with_prefix_cache();
      default:
        return with_handles();
    }
  }

 private:
  template <typename H>
  H* handle() {
    const std::vector<void*> handles = world_.handles();
    const uint8_t choice = bytes_.next();
    if (choice % 16 == 0) return nullptr;
    if (choice % 16 == 1) return reinterpret_cast<H*>(&world_.q.tensor);
    if (choice % 16 == 2) return reinterpret_cast<H*>(static_cast<char*>(handles[0]) + 1);
    return static_cast<H*>(handles[choice % handles.size()]);
  }

  // Changes numbers of a struct that consists of int32_t after its size.
  template <typename S>
  void mutate_ints(S& value) {
    for (int i = 0; i < 1 + bytes_.next() % 3; ++i) {
      const size_t field = 1 + bytes_.next() % (sizeof(S) / sizeof(int32_t) - 1);
      const int32_t number = bytes_.pick(kInts);
      std::memcpy(reinterpret_cast<char*>(&value) + field * sizeof(int32_t), &number,
                  sizeof number);
    }
  }

  void mutate_content() {
    WorldArray* const arrays[] = {&world_.q_indptr,        &world_.kv_lens,   &world_.rows,
                                  &world_.slots,           &world_.out_slots, &world_.positions,
                                  &world_.rotary_positions};
    WorldArray& array = *bytes_.pick(arrays);
    const int32_t number = bytes_.pick(kInts);
    const size_t place = bytes_.next() * sizeof(int32_t) % array.bytes;
    std::memcpy(array.data + place, &number, sizeof number);
  }

  void mutate_batch(fovea_batch& batch) {
    int32_t* const numbers[] = {&batch.mode,
                                &batch.requests,
                                &batch.tokens,
                                &batch.entry_tokens,
                                &batch.reserved,
                                &batch.hints.max_q_len,
                                &batch.hints.max_kv_len,
                                &batch.hints.prefix_written};
    const DLTensor** const tensors[] = {&batch.q_indptr,
                                        &batch.kv_lens,
                                        &batch.request_rows,
                                        &batch.table,
                                        &batch.out_slots,
                                        &batch.positions,
                                        &batch.cross.lens,
                                        &batch.hints.host_q_lens,
                                        &batch.hints.host_kv_lens,
                                        &batch.hints.shared_prefix,
                                        &batch.masks.tree_ancestors,
                                        &batch.linear.state_slots,
                                        &batch.draft_counts};
    if (bytes_.next() % 2 == 0) *bytes_.pick(numbers) = bytes_.pick(kInts);
    if (bytes_.next() % 3 == 0) *bytes_.pick(tensors) = any_view();
  }

  void mutate_layer(fovea_layer_tensors& layer) {
    int32_t* const numbers[] = {&layer.layer,
                                &layer.save_kv,
                                &layer.reserved,
                                &layer.rotary.interleaved,
                                &layer.linear.l2_normalise_qk,
                                &layer.linear.plain_conv};
    const DLTensor** const tensors[] = {
        &layer.q,           &layer.k,          &layer.v,          &layer.out,
        &layer.lse,         &layer.sinks,      &layer.q_scale,    &layer.alibi_slopes,
        &layer.dual_q_succ, &layer.rotary.sin, &layer.mla.latent, &layer.linear.mixed};
    if (bytes_.next() % 2 == 0) *bytes_.pick(numbers) = bytes_.pick(kInts);
    if (bytes_.next() % 3 == 0) *bytes_.pick(tensors) = any_view();
  }

  const DLTensor* any_view() {
    const std::vector<WorldArray*> arrays = world_.arrays();
    const uint8_t choice = bytes_.next();
    return choice % 8 == 0 ? nullptr : arrays[choice % arrays.size()]->view();
  }

  fovea_status run_pass() {
    // Half of the passes change the layer of a valid batch, because few changed batches are valid.
    const bool keep_batch = bytes_.next() % 2 == 0;
    Sized<fovea_batch> batch(world_.batch);
    Sized<fovea_layer_tensors> layer(world_.layer);
    if (!keep_batch) mutate_batch(*batch.get());
    mutate_layer(*layer.get());
    if (keep_batch) {
      if (fovea_backend_plan(world_.backend, batch.get(), nullptr) != FOVEA_OK)
        return FOVEA_INTERNAL;
    }
    for (int i = 0; i < bytes_.next() % 3; ++i) {
      const std::vector<WorldArray*> arrays = world_.arrays();
      mutate_tensor(arrays[bytes_.next() % arrays.size()]->tensor.view, bytes_);
    }
    if (!keep_batch) {
      if (bytes_.next() % 4 == 0) mutate_content();
      batch.mutate(bytes_);
      const fovea_status status = fovea_backend_plan(world_.backend, batch.get(), nullptr);
      if (status != FOVEA_OK) return status;
    }
    layer.mutate(bytes_);
    return fovea_backend_forward(world_.backend, layer.get(), nullptr);
  }

  fovea_status with_spec() {
    Sized<fovea_attention_spec> spec(world_.spec);
    mutate_ints(*spec.get());
    spec.mutate(bytes_);
    Sized<fovea_selection_request> request(world_.request);
    request.get()->spec = spec.get();
    request.get()->allow_none = bytes_.pick(kInts) & 3;
    request.mutate(bytes_);
    fovea_selection* made = nullptr;
    const fovea_status status = fovea_selection_create(request.get(), &made);
    if (status != FOVEA_OK) return status;
    size_t bytes = 0;
    const fovea_status read = fovea_selection_explain(made, nullptr, &bytes);
    fovea_selection_destroy(made);
    return read;
  }

  fovea_status with_cache() {
    Sized<fovea_kv_cache_spec> cache(world_.cache);
    mutate_ints(*cache.get());
    cache.mutate(bytes_);
    const int64_t pages = bytes_.pick(kInts);
    size_t bytes = 0;
    const fovea_status status = fovea_kv_pool_bytes(cache.get(), pages, 0, &bytes);
    if (status != FOVEA_OK || bytes > 1 << 20) return status;
    fovea_kv_pool* made = nullptr;
    const fovea_device device = {bytes_.next() % 8 == 0 ? bytes_.pick(kInts) : 0,
                                 bytes_.next() % 8 == 0 ? bytes_.pick(kInts) : 0};
    const fovea_status created = fovea_kv_pool_create(cache.get(), pages, device, &made);
    if (created != FOVEA_OK) return created;
    fovea_kv_layer_view view;
    fovea_kv_layer_view_init(&view, sizeof view);
    const fovea_status read = fovea_kv_pool_layer(made, bytes_.pick(kInts), &view);
    fovea_kv_pool_destroy(made);
    return read;
  }

  fovea_status with_limits() {
    Sized<fovea_batch_limits> limits(world_.limits);
    mutate_ints(*limits.get());
    limits.mutate(bytes_);
    size_t bytes = 0;
    const fovea_status status = fovea_backend_workspace_bytes(world_.backend, limits.get(), &bytes);
    if (status != FOVEA_OK || bytes > 1 << 22) return status;
    const fovea_status reserved = fovea_backend_reserve(world_.backend, limits.get(), nullptr, 0);
    if (fovea_backend_reserve(world_.backend, &world_.limits, nullptr, 0) != FOVEA_OK) {
      return FOVEA_INTERNAL;
    }
    return reserved;
  }

  fovea_status with_tables();
  fovea_status with_prefix_cache();
  fovea_status with_handles();

  SmallWorld& world_;
  FuzzBytes& bytes_;
};

fovea_status Caller::with_tables() {
  const int32_t a = bytes_.pick(kInts), b = bytes_.pick(kInts);
  const int32_t slots[8] = {a, b, 4, 5, 6, 7, 8, 9};
  const int64_t wide[4] = {a, b, 4, 5};
  std::array<int64_t, kWorldContext> taken;
  int32_t number = 0;
  switch (bytes_.next() % 10) {
    case 0:
      return fovea_request_table_release(world_.table, a);
    case 1:
      return fovea_request_table_mark_changed(world_.table, a, b);
    case 2: {
      const int32_t length = std::min(a, std::max(b, 0) > kWorldContext ? 0 : b + kWorldContext);
      if (int64_t{length} - b > kWorldContext) return FOVEA_OK;
      return fovea_page_allocator_extend(world_.allocator, b, length, wide[2], taken.data());
    }
    case 3:
      return fovea_page_allocator_allocate(world_.allocator, a > kWorldContext ? -a : a,
                                           taken.data());
    case 4:
      return fovea_page_allocator_release(world_.allocator, a);
    case 5:
      return fovea_page_allocator_truncate(world_.allocator, slots, 8, a);
    case 6:
      return fovea_window_kv_pool_map(world_.window_pool, wide, 4);
    case 7:
      return fovea_window_kv_pool_unmap(world_.window_pool, wide, 4);
    case 8:
      return fovea_state_pool_copy(world_.states, a, b);
    default:
      return fovea_page_allocator_references(world_.allocator, a, &number);
  }
}

fovea_status Caller::with_prefix_cache() {
  constexpr size_t kTokens = 64;
  static const int32_t tokens[kTokens] = {1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8};
  fovea_prefix valid;
  fovea_prefix_init(&valid, sizeof valid);
  valid.tokens = bytes_.next() % 8 == 0 ? nullptr : tokens;
  valid.token_count = bytes_.next() % (kTokens + 1);
  valid.salt = bytes_.next() % 2 == 0 ? nullptr : "salt";
  Sized<fovea_prefix> prefix(valid);
  prefix.mutate(bytes_);
  std::array<int64_t, kTokens> pages;
  for (int64_t& page : pages) page = bytes_.next() % 4 == 0 ? bytes_.pick(kInts) : 1;
  size_t count = bytes_.next() % kTokens;
  int32_t number = 0;
  fovea_prefix_match match;
  fovea_prefix_match_init(&match, sizeof match);
  match.pages = pages.data();
  match.page_capacity = count;
  switch (bytes_.next() % 6) {
    case 0:
      return fovea_prefix_cache_insert(world_.prefix_cache, prefix.get(), pages.data(), count,
                                       bytes_.pick(kInts));
    case 1:
      return fovea_prefix_cache_match(world_.prefix_cache, prefix.get(), bytes_.pick(kInts),
                                      &match);
    case 2:
      return fovea_prefix_cache_pin(world_.prefix_cache, prefix.get(), &number);
    case 3:
      return fovea_prefix_cache_unpin(world_.prefix_cache, prefix.get());
    case 4:
      return fovea_prefix_cache_evict(world_.prefix_cache, bytes_.next() % kTokens, pages.data(),
                                      &count);
    default:
      return fovea_prefix_cache_clear(world_.prefix_cache, pages.data(), &count);
  }
}

fovea_status Caller::with_handles() {
  size_t bytes = 0;
  int32_t number = 0;
  int64_t wide = 0;
  fovea_backend* made = nullptr;
  fovea_status status = FOVEA_OK;
  switch (bytes_.next() % 8) {
    case 0:
      return fovea_backend_plan(handle<fovea_backend>(), &world_.batch, nullptr);
    case 1:
      return fovea_selection_explain(handle<fovea_selection>(), nullptr, &bytes);
    case 2:
      return fovea_kv_pool_pages(handle<fovea_kv_pool>(), &wide);
    case 3:
      return fovea_window_kv_pool_free_pages(handle<fovea_kv_pool>(), &wide);
    case 4:
      return fovea_thread_pool_size(handle<fovea_thread_pool>(), &number);
    case 5:
      status = fovea_backend_create(handle<fovea_selection>(), handle<fovea_kv_pool>(),
                                    handle<fovea_state_pool>(), handle<fovea_thread_pool>(), &made);
      break;
    case 6:
      status = fovea_compose_by_phase(handle<fovea_backend>(), handle<fovea_backend>(),
                                      bytes_.pick(kInts), &made);
      break;
    default:
      return fovea_pass_addresses_check(handle<fovea_pass_addresses>(),
                                        handle<fovea_pass_addresses>());
  }
  if (status == FOVEA_OK) status = fovea_backend_destroy(made);
  return status;
}

bool contains(std::string_view message, std::string_view part) {
  return message.find(part) != message.npos;
}

// Returns true if the message has an argument's name and a value: a number or its absence.
bool names_an_argument(std::string_view message) {
  constexpr std::string_view kAbsences[] = {"null", "absent", "given", "plan", "fovea_", " is "};
  const auto in_message = [&](std::string_view part) { return contains(message, part); };
  return std::ranges::any_of(kArguments, in_message) &&
         (message.find_first_of("0123456789") != message.npos ||
          std::ranges::any_of(kAbsences, in_message));
}

}  // namespace

std::string fuzz_calls(std::span<const uint8_t> data, FuzzCount& count) {
  static SmallWorld world;
  FuzzBytes bytes(data);
  Caller caller(world, bytes);
  while (!bytes.empty()) {
    const fovea_status status = caller.call();
    ++count.calls;
    if (status == FOVEA_OK) ++count.accepted;
    if (status == FOVEA_OK || status == FOVEA_FULL) continue;
    const std::string message = fovea_last_error();
    const bool expected = status == FOVEA_INVALID_ARGUMENT || status == FOVEA_UNSUPPORTED ||
                          status == FOVEA_OUT_OF_MEMORY;
    if (!expected || !names_an_argument(message)) {
      return "status " + std::to_string(status) + ": " + message;
    }
  }
  return {};
}

}  // namespace fovea::test
