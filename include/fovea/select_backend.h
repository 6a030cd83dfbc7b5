// SPDX-License-Identifier: Apache-2.0
// Chooses a backend from a table, by the needs of the layers and the device, and keeps every reason
// of every rejection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fovea/api.h"
#include "fovea/attention_backend.h"

namespace FOVEA_API fovea {

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
  not_built,  // known, but this build has no code for it
  kernels,    // no machine code: not in the pack, and compiling is impossible or forbidden
};

std::string_view reject_code_name(RejectCode code);

struct Reason {
  RejectCode code;
  std::string text;  // names the value and the accepted values
};

// Support for captures in CUDA graphs: of no pass, or of every pass.
enum class GraphSupport : uint8_t { never, always };

// The input of backend selection. `cache` is ignored for linear kinds and uncached scopes. On the
// CPU, device.cores is the size of the thread pool that the backend will get. A GPU's `device` is
// one of gpu_devices(), or describes a GPU elsewhere by its kind, sm and cores.
struct BackendRequest {
  AttentionSpec spec = {};
  KvCacheSpec cache = {};
  BatchLimits limits = {};
  DeviceInfo device = {};
};

// A row of the table of backends.
struct BackendEntry {
  std::string name = {};
  std::string role = {};                  // one line for `fovea backends`
  std::vector<std::string> aliases = {};  // names other engines use for the same role
  GraphSupport graphs = GraphSupport::never;
  // Returns every reason against serving the request. If empty, the backend serves every batch
  // within the limits.
  std::function<std::vector<Reason>(const BackendRequest&)> reject = {};
  // Returns the exact maximum over all batches within the limits, in bytes, without using a device.
  // Throws Error{unsupported} if `reject` gives a reason.
  std::function<size_t(const BackendRequest&)> workspace_bytes = {};
  // Creates the backend, which does not refer to the entry afterwards. Throws Error{unsupported} if
  // `reject` gives a reason, Error{invalid_argument} if the context contradicts itself,
  // Error{out_of_memory} or {device_failure}.
  std::function<std::unique_ptr<AttentionBackend>(const BackendContext&)> create = {};
  // Returns a line for explain() about how an accepted request is served, if that depends on its
  // batches. May be null or return an empty string.
  std::function<std::string(const BackendRequest&)> notes = {};
  // Name of a preferred backend for the same layers. If auto chooses this one instead, the
  // selection says why. Empty: none.
  std::string stands_in_for = {};
  // Why this build has no code for the backend. Empty: it has.
  std::string why_not_built = {};
};

// The effect of BackendRegistry::add() if another backend has the name or an alias.
enum class TakenName : uint8_t { refuse, take_over };

// Backends in order of preference. builtin() has those of the library. add() inserts further ones
// at the front, so that auto prefers them if they accept.
class BackendRegistry {
 public:
  static BackendRegistry builtin();

  // refuse: throws Error{invalid_argument} if a name or alias is taken. take_over: removes the
  // backend that has the name, and the alias from a backend that has it.
  void add(BackendEntry entry, TakenName taken = TakenName::refuse);

  std::span<const BackendEntry> entries() const& { return entries_; }
  std::span<const BackendEntry> entries() const&& = delete;  // the span would dangle
  // Finds a backend by name or alias; null: unknown. Valid until the next add().
  const BackendEntry* find(std::string_view name_or_alias) const;
  std::string known_names() const;  // comma-separated, for error messages

 private:
  std::vector<BackendEntry> entries_;
};

enum class Policy : uint8_t {
  auto_,    // the first backend that accepts
  prefer,   // the named backend if it accepts, else as auto_; Selection::fallback says why
  require,  // the named backend, or an error with all its reasons
};

struct BackendWish {
  Policy policy = Policy::auto_;
  std::string name = {};  // name or alias; ignored for auto_
};

// Parses the CLI's spelling: "auto", "NAME" (require) or "prefer:NAME". Throws
// Error{invalid_argument} for another form; select_backend() reports unknown names.
BackendWish parse_backend_wish(std::string_view text);

struct Candidate {
  std::string name;
  std::vector<Reason> reasons;  // empty: accepted
};

struct Selection {
  const BackendEntry* chosen = nullptr;  // entry of the registry, which must outlive it
  std::string asked;                     // name or alias of the wish, empty for auto_
  // Why the preferred backend was not chosen: that of `prefer`, or the one that the chosen backend
  // stands in for. One line; empty: it was chosen.
  std::string fallback;
  size_t workspace_bytes = 0;         // the chosen backend's
  std::string notes;                  // the chosen backend's
  std::vector<Candidate> candidates;  // every backend, in order of preference

  // Returns plain text: the choice and its alias, then every rejected backend with its reasons.
  std::string explain() const;
};

// Chooses a backend. Throws Error{unsupported} with the reasons of all backends (require: of the
// named one) if none accepts, and Error{invalid_argument} for a name that is unknown, listing the
// known ones, or for a request that contradicts itself.
Selection select_backend(const BackendRegistry& registry, const BackendRequest& request,
                         const BackendWish& wish = {});
Selection select_backend(const BackendRegistry&&, const BackendRequest&,
                         const BackendWish& = {}) = delete;  // Selection::chosen would dangle

// The backends of a composition by phase.
enum class Phase : uint8_t { prefill, decode };

// Composes two backends: `decode` plans decode batches, `verify` names the one for target_verify,
// `prefill` plans the others. forward() goes to the backend of the last plan(). Throws
// Error{invalid_argument} for a null backend and for backends on two devices or over two pools
// (AttentionBackend::kv() and state()). If a backend does not report its pool, the caller must
// guarantee that they share one.
std::unique_ptr<AttentionBackend> compose_by_phase(std::unique_ptr<AttentionBackend> prefill,
                                                   std::unique_ptr<AttentionBackend> decode,
                                                   Phase verify = Phase::prefill);

// Composes two backends in the same way: `trees` plans batches with BatchMasks::tree, `plain` the
// others, whose kernels need no mask.
std::unique_ptr<AttentionBackend> compose_by_mask(std::unique_ptr<AttentionBackend> plain,
                                                  std::unique_ptr<AttentionBackend> trees);

// Composes backends of several layer groups: layer i of the model goes to parts[part_of_layer[i]],
// as layer layer_in_part[i] of its pool. All parts plan the same batch. Throws
// Error{invalid_argument} for a null part, parts on two devices, or an entry that names no part or
// a negative layer.
std::unique_ptr<AttentionBackend> compose_by_layer(
    std::vector<std::unique_ptr<AttentionBackend>> parts, std::vector<int32_t> part_of_layer,
    std::vector<int32_t> layer_in_part);

}  // namespace fovea
