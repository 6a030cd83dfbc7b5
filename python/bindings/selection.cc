// SPDX-License-Identifier: Apache-2.0
// Backend selection.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "fovea/select_backend.h"
#include "python/bindings/backends.h"
#include "python/bindings/devices.h"
#include "python/bindings/keywords.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

// A Selection with the request that it answers.
struct Choice {
  BackendRequest request;
  fovea::Selection selection;
  std::shared_ptr<ThreadPool> threads;  // null on a GPU
};

// The backends of the library, for the life of the process.
const BackendRegistry& registry() {
  static const auto* all = new BackendRegistry(BackendRegistry::builtin());
  return *all;
}

enum Argument : size_t { kLimits, kDevice, kThreads, kBackend, kArguments };
constexpr const char* kNames[kArguments] = {"limits", "device", "threads", "backend"};

Choice select(nb::handle spec, nb::handle cache, const nb::kwargs& keywords) {
  static const Keywords<kArguments> names(kNames);
  const auto arguments = names.read(keywords, "select");
  Choice choice;
  BackendRequest& request = choice.request;
  request.spec = value_from<AttentionSpec>(spec, "spec");
  if (is_given(cache)) request.cache = value_from<KvCacheSpec>(cache, "cache");
  if (arguments[kLimits].is_valid()) {
    request.limits = value_from<BatchLimits>(arguments[kLimits], kNames[kLimits]);
  }
  request.device = arguments[kDevice].is_valid()
                       ? device_info_from(arguments[kDevice], kNames[kDevice])
                       : cpu_device();
  if (request.device.kind == DeviceKind::cpu) {
    choice.threads = threads_from(arguments[kThreads], kNames[kThreads]);
    request.device.cores = choice.threads->size();
  } else {
    check_argument(!arguments[kThreads].is_valid(), "threads is given, a GPU does not take it");
  }
  const std::string wish =
      arguments[kBackend].is_valid() ? string_from(arguments[kBackend], kNames[kBackend]) : "auto";
  const BackendWish parsed = parse_backend_wish(wish);
  const nb::gil_scoped_release release;
  choice.selection = select_backend(registry(), request, parsed);
  return choice;
}

template <typename T>
T* pool_from(nb::handle object, const char* name, const char* type) {
  if (!is_given(object)) return nullptr;
  T* pool = nullptr;
  check_argument(nb::try_cast(object, pool) && pool != nullptr, "{} is {}, must be a {}", name,
                 type_text(object), type);
  return pool;
}

std::unique_ptr<Backend> create(const Choice& choice, nb::handle kv, nb::handle state) {
  BackendContext context{.spec = choice.request.spec,
                         .kv = pool_from<KvPool>(kv, "kv", "KvPool"),
                         .state = pool_from<StatePool>(state, "state", "StatePool"),
                         .threads = choice.threads.get(),
                         .device = choice.request.device.device()};
  BackendParts parts{nb::borrow(kv), nb::borrow(state), choice.threads};
  std::unique_ptr<AttentionBackend> backend;
  {
    const nb::gil_scoped_release release;
    backend = choice.selection.chosen->create(context);
  }
  return std::make_unique<Backend>(choice.request.spec, std::move(parts), std::move(backend));
}

void bind_reasons(nb::module_& module) {
  nb::class_<Reason>(module, "Reason", "Why a backend does not serve a request.", nb::is_final())
      .def_prop_ro("code", [](const Reason& self) { return self.code; })
      .def_ro("text", &Reason::text)
      .def("__repr__", [](const Reason& self) {
        return fmt::format("Reason({}: {})", reject_code_name(self.code), self.text);
      });
  nb::class_<Candidate>(module, "Candidate",
                        "A backend of the table; without reasons it accepts the request.",
                        nb::is_final())
      .def_ro("name", &Candidate::name)
      .def_ro("reasons", &Candidate::reasons)
      .def("__repr__", [](const Candidate& self) {
        return fmt::format("Candidate('{}', {} reasons)", self.name, self.reasons.size());
      });
}

}  // namespace

void bind_selection(nb::module_& module) {
  bind_reasons(module);
  nb::class_<Choice>(module, "Selection",
                     "A choice of backend, with every reason of every rejection.", nb::is_final())
      .def_prop_ro("name", [](const Choice& self) { return self.selection.chosen->name; })
      .def_prop_ro("asked", [](const Choice& self) { return self.selection.asked; })
      .def_prop_ro("fallback", [](const Choice& self) { return self.selection.fallback; })
      .def_prop_ro("workspace_bytes",
                   [](const Choice& self) { return self.selection.workspace_bytes; })
      .def_prop_ro("notes", [](const Choice& self) { return self.selection.notes; })
      .def_prop_ro(
          "graphs",
          [](const Choice& self) { return self.selection.chosen->graphs == GraphSupport::always; },
          "True if passes of the backend can be captured in CUDA graphs.")
      .def_prop_ro("candidates", [](const Choice& self) { return self.selection.candidates; })
      .def_prop_ro("spec", [](const Choice& self) { return self.request.spec; })
      .def_prop_ro("limits", [](const Choice& self) { return self.request.limits; })
      .def_prop_ro("device", [](const Choice& self) { return self.request.device.device(); })
      .def(
          "explain", [](const Choice& self) { return self.selection.explain(); },
          "Returns plain text: the choice, then every rejected backend with its reasons.")
      .def("create", &create, nb::arg("kv") = nb::none(), nb::arg("state") = nb::none(),
           nb::sig("def create(self, kv: KvPool | None = None, state: StatePool | None = None) -> "
                   "Backend"),
           "Creates the backend over pools, which it keeps. Call reserve() before plan().")
      .def("__repr__", [](const Choice& self) {
        return fmt::format("<fovea.Selection '{}'>", self.selection.chosen->name);
      });
  module.def("select", &select, nb::arg("spec"), nb::arg("cache") = nb::none(),
             nb::arg("arguments"),
             nb::sig("def select(spec: AttentionSpec, cache: KvCacheSpec | None = None, *, limits: "
                     "BatchLimits = ..., device: Device | DeviceInfo | str = 'cpu', threads: "
                     "ThreadPool | int | None = None, backend: str = 'auto') -> Selection"),
             "Chooses a backend. backend is \"auto\", \"NAME\" (required) or \"prefer:NAME\". "
             "threads: of the CPU; None is a pool of all cores that the process shares. Raises "
             "Error with the code \"unsupported\" and every reason if no backend accepts.");
  module.def(
      "backends",
      [] {
        nb::list all;
        for (const BackendEntry& entry : registry().entries()) {
          all.append(nb::make_tuple(entry.name, entry.role));
        }
        return all;
      },
      nb::sig("def backends() -> list[tuple[str, str]]"),
      "Returns name and role of every backend, in order of preference.");
}

}  // namespace fovea::python
