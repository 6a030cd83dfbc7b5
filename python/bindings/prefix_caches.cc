// SPDX-License-Identifier: Apache-2.0
// Prefix caches.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "fovea/prefix_cache.h"
#include "python/bindings/array.h"
#include "python/bindings/module.h"
#include "python/bindings/value_type.h"

namespace fovea::python {
namespace {

// A PrefixDomain with its strings.
struct Domain {
  std::string model, adapter, kv_format, salt;

  bool operator==(const Domain&) const = default;
  PrefixDomain view() const { return {model, adapter, kv_format, salt}; }
};

// A PrefixCache with the allocator and the states that it refers to.
struct Cache {
  nb::object allocator, states;
  std::unique_ptr<PrefixCache> cache;
};

Domain domain_from(nb::handle object) { return value_from<Domain>(object, "domain"); }

PrefixMatch match(Cache& self, nb::handle domain, nb::handle tokens, nb::handle max_tokens) {
  const std::vector<int32_t> ids = integers_of<int32_t>(tokens, "tokens");
  const int32_t limit = max_tokens.is_none() ? static_cast<int32_t>(ids.size())
                                             : integer_from<int32_t>(max_tokens, "max_tokens");
  return self.cache->match(domain_from(domain).view(), ids, limit);
}

void insert(Cache& self, nb::handle domain, nb::handle tokens, nb::handle pages,
            nb::handle state_slot) {
  self.cache->insert(domain_from(domain).view(), integers_of<int32_t>(tokens, "tokens"),
                     integers_of<int64_t>(pages, "pages"),
                     integer_from<int32_t>(state_slot, "state_slot"));
}

void make_cache(Cache* self, nb::handle pages, nb::handle state) {
  PageAllocator* allocator = nullptr;
  check_argument(nb::try_cast(pages, allocator) && allocator != nullptr,
                 "pages is {}, must be a PageAllocator", type_text(pages));
  StatePool* states = nullptr;
  check_argument(state.is_none() || (nb::try_cast(state, states) && states != nullptr),
                 "state is {}, must be a StatePool", type_text(state));
  new (self) Cache{nb::borrow(pages), nb::borrow(state),
                   std::make_unique<PrefixCache>(*allocator, states)};
}

void bind_results(nb::module_& module) {
  nb::class_<PrefixMatch>(module, "PrefixMatch", "A cached prefix.", nb::is_final())
      .def_ro("tokens", &PrefixMatch::tokens, "A multiple of the page size.")
      .def_ro("pages", &PrefixMatch::pages, "Its pages, in order; release each when done.")
      .def_ro("state_slot", &PrefixMatch::state_slot,
              "The snapshot of linear layers after `tokens` tokens; -1: none.")
      .def("__repr__", [](const PrefixMatch& self) {
        return fmt::format("PrefixMatch(tokens={}, state_slot={})", self.tokens, self.state_slot);
      });
  nb::class_<PrefixCacheStats>(module, "PrefixCacheStats", "Counters of a prefix cache.",
                               nb::is_final())
      .def_ro("queries", &PrefixCacheStats::queries, "Tokens looked up.")
      .def_ro("hits", &PrefixCacheStats::hits, "Tokens found.")
      .def_ro("pages", &PrefixCacheStats::pages, "Pages in the tree.")
      .def_ro("evicted_pages", &PrefixCacheStats::evicted_pages)
      .def_ro("snapshots", &PrefixCacheStats::snapshots, "Snapshots in the tree.");
}

}  // namespace

template <>
std::span<const Field<Domain>> fields_of<Domain>() {
  static constexpr Field<Domain> table[] = {
      field<&Domain::model>("model"), field<&Domain::adapter>("adapter"),
      field<&Domain::kv_format>("kv_format"), field<&Domain::salt>("salt")};
  return table;
}

void bind_prefix_caches(nb::module_& module) {
  bind_value_type<Domain>(module, "PrefixDomain",
                          "def __init__(self, *, model: str = '', adapter: str = '', kv_format: "
                          "str = '', salt: str = '') -> None",
                          "The conditions, besides equal tokens, under which cached keys and "
                          "values can be reused.");
  bind_results(module);
  nb::class_<Cache>(module, "PrefixCache",
                    "Finds the pages that hold the keys and values of a token prefix. Tokens are "
                    "int32 or int64 arrays, or sequences.",
                    nb::is_final())
      .def("__init__", &make_cache, nb::arg("pages"), nb::arg("state") = nb::none(),
           nb::sig("def __init__(self, pages: PageAllocator, state: StatePool | None = None) -> "
                   "None"))
      .def("match", &match, nb::arg("domain"), nb::arg("tokens"),
           nb::arg("max_tokens") = nb::none(),
           "Returns the longest cached prefix of at most max_tokens tokens; its pages are retained "
           "for the caller.")
      .def("insert", &insert, nb::arg("domain"), nb::arg("tokens"), nb::arg("pages"),
           nb::arg("state_slot") = -1,
           "Adds the full pages of `tokens`. The caller keeps its own references.")
      .def(
          "evict",
          [](Cache& self, nb::handle pages) {
            return self.cache->evict(integer_from<int64_t>(pages, "pages"));
          },
          nb::arg("pages"), "Frees pages that only the cache holds, and returns them.")
      .def(
          "evict_state", [](Cache& self) { return self.cache->evict_state(); },
          "Frees the least recently used snapshot. Returns False if there is none.")
      .def(
          "pin",
          [](Cache& self, nb::handle domain, nb::handle tokens) {
            return self.cache->pin(domain_from(domain).view(),
                                   integers_of<int32_t>(tokens, "tokens"));
          },
          nb::arg("domain"), nb::arg("tokens"),
          "Protects a prefix from eviction; returns the number of pinned tokens.")
      .def(
          "unpin",
          [](Cache& self, nb::handle domain, nb::handle tokens) {
            self.cache->unpin(domain_from(domain).view(), integers_of<int32_t>(tokens, "tokens"));
          },
          nb::arg("domain"), nb::arg("tokens"))
      .def(
          "clear", [](Cache& self) { return self.cache->clear(); },
          "Drops every page that is neither pinned nor in use, and returns the freed pages.")
      .def_prop_ro("stats", [](const Cache& self) { return self.cache->stats(); });
}

}  // namespace fovea::python
