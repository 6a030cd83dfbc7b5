// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "c/handles.h"
#include "c/specs.h"

namespace fovea::c {
namespace {

constexpr fovea_selection_request kDefaultRequest = {.struct_size =
                                                         sizeof(fovea_selection_request)};

BackendRequest to_request(const fovea_selection_request& from) {
  BackendRequest to;
  to.spec = to_spec(from.spec, "request.spec");
  if (from.cache != nullptr) to.cache = to_spec(from.cache, "request.cache");
  to.limits = to_limits(from.limits);
  to.device = from.device == nullptr ? cpu_device() : to_device_info(from.device);
  return to;
}

// Keeps the reasons of all candidates, and why none of them was chosen.
void keep_refusal(fovea_selection& selection, const BackendRegistry& registry, const Error& error) {
  selection.refusal = error.what();
  for (const BackendEntry& entry : registry.entries()) {
    selection.object.candidates.push_back({entry.name, entry.reject(selection.request)});
  }
}

void choose(fovea_selection& selection, const BackendWish& wish, bool allow_none) {
  const auto registry = std::make_shared<const BackendRegistry>(BackendRegistry::builtin());
  selection.owner = registry;
  try {
    selection.object = select_backend(*registry, selection.request, wish);
  } catch (const Error& error) {
    if (!allow_none || error.code() != ErrorCode::unsupported) throw;
    keep_refusal(selection, *registry, error);
  }
}

const Candidate& candidate_at(const fovea_selection* selection, size_t index) {
  const auto& candidates = need(selection, "selection").object.candidates;
  check(index < candidates.size(), "candidate is {}, the selection has {}", index,
        candidates.size());
  return candidates[index];
}

const Reason& reason_at(const fovea_selection* selection, size_t candidate, size_t index) {
  const Candidate& given = candidate_at(selection, candidate);
  check(index < given.reasons.size(), "reason is {}, '{}' has {}", index, given.name,
        given.reasons.size());
  return given.reasons[index];
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_reject_code_name(int32_t code, char* text, size_t* bytes) {
  return guarded([&] {
    const auto reject = to_enum(code, fovea::RejectCode::kernels, "code");
    give_text(fovea::reject_code_name(reject), text, bytes);
  });
}

fovea_status fovea_selection_request_init(fovea_selection_request* request, size_t struct_size) {
  return init_struct(request, struct_size, kDefaultRequest, "request");
}

fovea_status fovea_selection_create(const fovea_selection_request* request,
                                    fovea_selection** selection) {
  return guarded([&] {
    clear_handle(selection, "selection");
    const fovea_selection_request from = read_struct(request, kDefaultRequest, "request");
    auto made = std::make_unique<fovea_selection>();
    made->request = to_request(from);
    choose(*made, fovea::parse_backend_wish(from.backend == nullptr ? "auto" : from.backend),
           to_flag(from.allow_none, "request.allow_none"));
    give_handle(std::move(made), selection);
  });
}

fovea_status fovea_selection_destroy(fovea_selection* selection) {
  return destroy_handle(selection, "selection");
}

fovea_status fovea_selection_name(const fovea_selection* selection, char* text, size_t* bytes) {
  return guarded([&] {
    const fovea::BackendEntry* const chosen = need(selection, "selection").object.chosen;
    give_text(chosen == nullptr ? "" : chosen->name, text, bytes);
  });
}

fovea_status fovea_selection_asked(const fovea_selection* selection, char* text, size_t* bytes) {
  return guarded([&] { give_text(need(selection, "selection").object.asked, text, bytes); });
}

fovea_status fovea_selection_fallback(const fovea_selection* selection, char* text, size_t* bytes) {
  return guarded([&] { give_text(need(selection, "selection").object.fallback, text, bytes); });
}

fovea_status fovea_selection_notes(const fovea_selection* selection, char* text, size_t* bytes) {
  return guarded([&] { give_text(need(selection, "selection").object.notes, text, bytes); });
}

fovea_status fovea_selection_explain(const fovea_selection* selection, char* text, size_t* bytes) {
  return guarded([&] {
    const fovea_selection& given = need(selection, "selection");
    give_text(given.object.chosen == nullptr ? given.refusal : given.object.explain(), text, bytes);
  });
}

fovea_status fovea_selection_workspace_bytes(const fovea_selection* selection, size_t* bytes) {
  return guarded([&] { set(bytes, need(selection, "selection").object.workspace_bytes, "bytes"); });
}

fovea_status fovea_selection_graphs(const fovea_selection* selection, int32_t* captured) {
  return guarded([&] {
    const fovea::BackendEntry* const chosen = need(selection, "selection").object.chosen;
    set(captured, chosen != nullptr && chosen->graphs == fovea::GraphSupport::always, "captured");
  });
}

fovea_status fovea_selection_candidates(const fovea_selection* selection, size_t* count) {
  return guarded(
      [&] { set(count, need(selection, "selection").object.candidates.size(), "count"); });
}

fovea_status fovea_candidate_name(const fovea_selection* selection, size_t candidate, char* text,
                                  size_t* bytes) {
  return guarded([&] { give_text(candidate_at(selection, candidate).name, text, bytes); });
}

fovea_status fovea_candidate_reasons(const fovea_selection* selection, size_t candidate,
                                     size_t* count) {
  return guarded([&] { set(count, candidate_at(selection, candidate).reasons.size(), "count"); });
}

fovea_status fovea_reason_code(const fovea_selection* selection, size_t candidate, size_t reason,
                               int32_t* code) {
  return guarded([&] {
    set(code, static_cast<int32_t>(reason_at(selection, candidate, reason).code), "code");
  });
}

fovea_status fovea_reason_text(const fovea_selection* selection, size_t candidate, size_t reason,
                               char* text, size_t* bytes) {
  return guarded([&] { give_text(reason_at(selection, candidate, reason).text, text, bytes); });
}
