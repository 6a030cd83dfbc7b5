// SPDX-License-Identifier: Apache-2.0
#include "fovea/select_backend.h"

#include <algorithm>

#include "attention/validate/spec.h"
#include "core/check.h"

namespace fovea {
namespace {

std::string reasons_text(const Candidate& candidate) {
  std::string text = candidate.name + ": rejected\n";
  for (const Reason& reason : candidate.reasons) {
    text += fmt::format("  {}: {}\n", reject_code_name(reason.code), reason.text);
  }
  return text;
}

// `instead_of` is the name that the caller used for the refused backend.
std::string fallback_text(std::string_view chosen, std::string_view instead_of,
                          const Candidate& refused) {
  std::string text = fmt::format("{} serves instead of {}", chosen, instead_of);
  const char* separator = ": ";
  for (const Reason& reason : refused.reasons) {
    text += separator + reason.text;
    separator = "; ";
  }
  return text;
}

const BackendEntry* accepted(const BackendRegistry& registry, const Candidate& candidate) {
  return candidate.reasons.empty() ? registry.find(candidate.name) : nullptr;
}

const BackendEntry* first_accepted(const BackendRegistry& registry,
                                   std::span<const Candidate> candidates) {
  for (const Candidate& candidate : candidates) {
    if (const BackendEntry* entry = accepted(registry, candidate)) return entry;
  }
  std::string text = "no backend serves this request\n";
  for (const Candidate& candidate : candidates) text += reasons_text(candidate);
  text.pop_back();
  throw Error(ErrorCode::unsupported, text);
}

// Names backends that accept the request: in other engines one name can mean several backends
// (SGLang's flashinfer serves MLA, too).
std::string required_text(const BackendWish& wish, const Candidate& refused,
                          std::span<const Candidate> candidates) {
  std::string text = fmt::format("backend '{}' was required\n{}", wish.name, reasons_text(refused));
  std::string others;
  for (const Candidate& candidate : candidates) {
    if (candidate.reasons.empty()) others += (others.empty() ? "" : ", ") + candidate.name;
  }
  return text + "accepted by: " + (others.empty() ? "none" : others);
}

const BackendEntry* resolve(const BackendRegistry& registry, const std::string& name) {
  const BackendEntry* entry = registry.find(name);
  check_argument(entry != nullptr, "unknown backend '{}', known: {}", name, registry.known_names());
  return entry;
}

}  // namespace

std::string_view reject_code_name(RejectCode code) {
  switch (code) {
    case RejectCode::device:
      return "device";
    case RejectCode::kind:
      return "kind";
    case RejectCode::scope:
      return "scope";
    case RejectCode::mask:
      return "mask";
    case RejectCode::heads:
      return "heads";
    case RejectCode::head_dim:
      return "head_dim";
    case RejectCode::q_dtype:
      return "q_dtype";
    case RejectCode::kv_dtype:
      return "kv_dtype";
    case RejectCode::kv_scale:
      return "kv_scale";
    case RejectCode::kv_layout:
      return "kv_layout";
    case RejectCode::window:
      return "window";
    case RejectCode::chunk:
      return "chunk";
    case RejectCode::dual_chunk:
      return "dual_chunk";
    case RejectCode::logit_cap:
      return "logit_cap";
    case RejectCode::sinks:
      return "sinks";
    case RejectCode::alibi:
      return "alibi";
    case RejectCode::rope:
      return "rope";
    case RejectCode::lse:
      return "lse";
    case RejectCode::batch_invariant:
      return "batch_invariant";
    case RejectCode::limits:
      return "limits";
    case RejectCode::kernels:
      return "kernels";
    case RejectCode::not_built:
      return "not_built";
  }
  return "?";
}

BackendWish parse_backend_wish(std::string_view text) {
  constexpr std::string_view kPrefer = "prefer:";
  if (text == "auto") return {};
  BackendWish wish{Policy::require, std::string(text)};
  if (text.starts_with(kPrefer)) {
    wish = {Policy::prefer, std::string(text.substr(kPrefer.size()))};
  }
  check_argument(!wish.name.empty() && wish.name.find(':') == std::string::npos,
                 "backend '{}' must be 'auto', a name or 'prefer:' and a name", text);
  return wish;
}

std::string Selection::explain() const {
  std::string text = fmt::format("{}: chosen", chosen->name);
  if (asked.empty()) {
    text += ", the first that accepts";
  } else if (fallback.empty()) {
    text += fmt::format(", asked for {}", asked);
  } else {
    text += fmt::format(", as the preferred {} is rejected", asked);
  }
  text += fmt::format(", workspace {} bytes\n", workspace_bytes);
  if (!chosen->role.empty()) text += fmt::format("  {}\n", chosen->role);
  if (!notes.empty()) text += fmt::format("  {}\n", notes);
  for (const Candidate& candidate : candidates) {
    if (candidate.name == chosen->name) continue;
    text += candidate.reasons.empty() ? candidate.name +
                                            ": accepts too, not asked for or later in "
                                            "the order of preference\n"
                                      : reasons_text(candidate);
  }
  return text;
}

Selection select_backend(const BackendRegistry& registry, const BackendRequest& request,
                         const BackendWish& wish) {
  validate_request(request);
  check_enum(wish.policy, Policy::require, "policy", "Policy");
  Selection selection;
  for (const BackendEntry& entry : registry.entries()) {
    selection.candidates.push_back({entry.name, entry.reject(request)});
  }
  if (wish.policy == Policy::auto_) {
    selection.chosen = first_accepted(registry, selection.candidates);
    const auto better =
        std::ranges::find(selection.candidates, selection.chosen->stands_in_for, &Candidate::name);
    if (better != selection.candidates.end() && !better->reasons.empty())
      selection.fallback = fallback_text(selection.chosen->name, better->name, *better);
  } else {
    selection.asked = wish.name;
    const BackendEntry* wanted = resolve(registry, wish.name);
    const auto candidate = std::find_if(selection.candidates.begin(), selection.candidates.end(),
                                        [&](const Candidate& c) { return c.name == wanted->name; });
    if (candidate->reasons.empty()) {
      selection.chosen = wanted;
    } else if (wish.policy == Policy::prefer) {
      selection.chosen = first_accepted(registry, selection.candidates);
      selection.fallback =
          fallback_text(selection.chosen->name, "the preferred " + wish.name, *candidate);
    } else {
      throw Error(ErrorCode::unsupported, required_text(wish, *candidate, selection.candidates));
    }
  }
  selection.workspace_bytes = selection.chosen->workspace_bytes(request);
  if (selection.chosen->notes) selection.notes = selection.chosen->notes(request);
  return selection;
}

}  // namespace fovea
