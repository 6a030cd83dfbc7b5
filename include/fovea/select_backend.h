// SPDX-License-Identifier: Apache-2.0
// Choosing a backend: a pure function of what is needed and what is there, with every reason of
// every rejection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/attention_backend.h"

namespace fovea {

enum class RejectCode : uint8_t {
  device,  // wrong processor, or hardware this build has no kernels for
  kind,    // attention kind
  scope,   // ragged, encoder or cross attention
  mask,
  heads,  // head counts or group size
  head_dim,
  q_dtype,
  kv_dtype,
  kv_scale,
  kv_layout,
  page_size,
  window,
  chunk,
  dual_chunk,
  logit_cap,
  sinks,
  alibi,
  rope,
  lse,
  batch_invariant,
  limits,     // batch limits
  not_built,  // known, but no code for it is in this build
  kernels,    // no machine code: not packed, and compiling is impossible or forbidden
};

std::string_view reject_code_name(RejectCode code);

struct Reason {
  RejectCode code;
  std::string text;  // names the value and what would be accepted
};

// Which batches a backend can serve from a captured graph.
enum class GraphSupport : uint8_t {
  never,
  uniform_single_token_decode,  // one new token for each request
  uniform_batch,                // the same number of new tokens for each request
  always,
};

// Everything selection looks at. `cache` is ignored for linear kinds and uncached scopes. On the
// CPU device.cores is the size of the thread pool the backend will get. A GPU's device is one of
// gpu_devices(), or a description of one that is not here: its kind, sm and cores are all that
// counts.
struct BackendRequest {
  AttentionSpec spec = {};
  KvCacheSpec cache = {};
  BatchLimits limits = {};
  DeviceInfo device = {};
};

// One row of the table of backends.
struct BackendEntry {
  std::string name = {};
  std::string role = {};                  // one line for `fovea backends`
  std::vector<std::string> aliases = {};  // names other engines use for the same role
  GraphSupport graphs = GraphSupport::never;
  // Every reason against serving the request; empty means it is served, for every batch within the
  // limits.
  std::function<std::vector<Reason>(const BackendRequest&)> reject = {};
  // Exact upper bound over every batch within the limits. Touches no device. Throws
  // Error{unsupported} where reject is not empty.
  std::function<size_t(const BackendRequest&)> workspace_bytes = {};
  // Throws Error{unsupported} where reject is not empty, Error{invalid_argument} where the context
  // contradicts itself, Error{out_of_memory} or {device_failure}. The backend does not need the
  // entry any more.
  std::function<std::unique_ptr<AttentionBackend>(const BackendContext&)> create = {};
  // What explain() adds: how an accepted request is served, where that depends on its batches. One
  // line; may be null or return nothing.
  std::function<std::string(const BackendRequest&)> notes = {};
  // Another backend that serves the same layers and is preferred to this one. Where auto comes to
  // this one, the selection says why. Empty: none.
  std::string stands_in_for = {};
  // Known, but no code for it is in this build, for this reason. Empty: there is.
  std::string why_not_built = {};
};

// What add() makes of a name or alias that another backend has.
enum class TakenName : uint8_t { refuse, take_over };

// Backends in order of preference. The library's own come from builtin(); add() puts further ones
// in front, so that AUTO prefers them where they fit.
class BackendRegistry {
 public:
  static BackendRegistry builtin();

  // Error{invalid_argument} when a name or alias is taken. take_over: its owner goes, or loses the
  // alias.
  void add(BackendEntry entry, TakenName taken = TakenName::refuse);

  std::span<const BackendEntry> entries() const& { return entries_; }
  std::span<const BackendEntry> entries() const&& = delete;  // the rows would be gone
  // By name or alias; null when unknown. Valid until the next add().
  const BackendEntry* find(std::string_view name_or_alias) const;
  std::string known_names() const;  // comma-separated, for error messages

 private:
  std::vector<BackendEntry> entries_;
};

enum class Policy : uint8_t {
  auto_,    // the first backend that accepts
  prefer,   // the named one if it accepts, else as auto_, and the selection says so
  require,  // the named one or an error with all its reasons
};

struct BackendWish {
  Policy policy = Policy::auto_;
  std::string name = {};  // name or alias; ignored for auto_
};

// "auto", "NAME" (require) or "prefer:NAME", as the CLI spells it; Error{invalid_argument} for
// another form. Whether there is such a backend says select_backend().
BackendWish parse_backend_wish(std::string_view text);

struct Candidate {
  std::string name;
  std::vector<Reason> reasons;  // empty: accepted
};

struct Selection {
  const BackendEntry* chosen = nullptr;  // of the registry, which must outlive it
  std::string asked;                     // the name or alias of the wish, empty for auto_
  // Why the backend of `prefer`, or the one that the chosen one stands in for, does not serve. One
  // line; empty where it serves.
  std::string fallback;
  size_t workspace_bytes = 0;         // of the chosen backend
  std::string notes;                  // of the chosen backend
  std::vector<Candidate> candidates;  // every backend, in order of preference

  // Plain text: the choice, what an alias resolved to, then every rejected backend with its
  // reasons.
  std::string explain() const;
};

// Throws Error{unsupported} with all reasons of all backends when none accepts (require: of the
// named one), Error{invalid_argument} listing the known names for an unknown one or for a spec that
// is contradictory in itself.
Selection select_backend(const BackendRegistry& registry, const BackendRequest& request,
                         const BackendWish& wish = {});
Selection select_backend(const BackendRegistry&&, const BackendRequest&,
                         const BackendWish& = {}) = delete;  // the chosen row would be gone

// The parts of a composition by phase.
enum class Phase : uint8_t { prefill, decode };

// Composition: decode batches go to `decode`, target_verify to the part that `verify` names, the
// rest to `prefill`. forward() follows the last plan(). Throws Error{invalid_argument} for a part
// that is null, and for parts on two devices or over two pools (AttentionBackend::kv() and state();
// where a part does not say its own, that is for the caller to see to).
std::unique_ptr<AttentionBackend> compose_by_phase(std::unique_ptr<AttentionBackend> prefill,
                                                   std::unique_ptr<AttentionBackend> decode,
                                                   Phase verify = Phase::prefill);

// Layer i of the model goes to parts[part_of_layer[i]], as layer layer_in_part[i] of its pool. All
// parts plan the same batch. Throws Error{invalid_argument} for a part that is null, parts on two
// devices, or an entry that names no part or a negative layer.
std::unique_ptr<AttentionBackend> compose_by_layer(
    std::vector<std::unique_ptr<AttentionBackend>> parts, std::vector<int32_t> part_of_layer,
    std::vector<int32_t> layer_in_part);

}  // namespace fovea
