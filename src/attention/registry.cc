// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>

#include "attention/backends/backends.h"
#include "core/check.h"
#include "fovea/select_backend.h"

namespace fovea {
namespace {

// Compares without case: engines spell the same name in capitals and in lower case.
bool same_name(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](unsigned char x, unsigned char y) {
    return std::tolower(x) == std::tolower(y);
  });
}

bool answers_to(const BackendEntry& entry, std::string_view name) {
  return same_name(entry.name, name) ||
         std::any_of(entry.aliases.begin(), entry.aliases.end(),
                     [&](const std::string& alias) { return same_name(alias, name); });
}

// Throws if a wish cannot spell the name: it has separators or is a word of the policy.
void check_name(std::string_view name) {
  const bool printable = std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return std::isgraph(c) && c != ':' && c != ',';
  });
  check_argument(!name.empty() && printable && !same_name(name, "auto"),
                 "backend name '{}' must be non-empty, without spaces, ':' and ',', and not 'auto'",
                 name);
}

std::vector<std::string> names_of(const BackendEntry& entry) {
  std::vector<std::string> names = entry.aliases;
  names.push_back(entry.name);
  return names;
}

}  // namespace

BackendRegistry BackendRegistry::builtin() {
  BackendRegistry registry;
  std::vector<BackendEntry> entries = builtin_backends();
  // add() inserts at the front.
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    registry.add(std::move(*entry));
  }
  return registry;
}

void BackendRegistry::add(BackendEntry entry, TakenName taken) {
  check_argument(entry.reject && entry.workspace_bytes && entry.create,
                 "backend '{}' needs reject, workspace_bytes and create", entry.name);
  check_enum(entry.graphs, GraphSupport::always, fmt::format("backend '{}': graphs", entry.name),
             "GraphSupport");
  check_enum(taken, TakenName::take_over, "taken", "TakenName");
  for (const std::string& name : names_of(entry)) {
    check_name(name);
    const BackendEntry* owner = find(name);
    check_argument(owner == nullptr || taken == TakenName::take_over,
                   "backend name '{}' is taken by '{}'", name, owner != nullptr ? owner->name : "");
  }
  for (const std::string& name : names_of(entry)) {
    std::erase_if(entries_, [&](const BackendEntry& old) { return same_name(old.name, name); });
    for (BackendEntry& old : entries_) {
      std::erase_if(old.aliases, [&](const std::string& alias) { return same_name(alias, name); });
    }
  }
  entries_.insert(entries_.begin(), std::move(entry));
}

const BackendEntry* BackendRegistry::find(std::string_view name_or_alias) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const BackendEntry& entry) {
    return answers_to(entry, name_or_alias);
  });
  return found == entries_.end() ? nullptr : &*found;
}

std::string BackendRegistry::known_names() const {
  std::string names;
  for (const BackendEntry& entry : entries_) {
    if (!names.empty()) names += ", ";
    names += entry.name;
  }
  return names;
}

}  // namespace fovea
