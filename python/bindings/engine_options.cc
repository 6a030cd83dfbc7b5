// SPDX-License-Identifier: Apache-2.0
// Engine.load() and explain().
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include "python/bindings/devices.h"
#include "python/bindings/engines.h"
#include "python/bindings/value_type.h"

namespace fovea::python {
namespace {

// Describes an option that is spelled like the CLI's: "auto", "NAME" or "prefer:NAME".
template <auto kMember>
constexpr Field<EngineOptions> wish(const char* name) {
  return {name,
          [](EngineOptions& options, nb::handle object, const char* label) {
            options.*kMember = parse_backend_wish(string_from(object, label));
          },
          nullptr, nullptr};
}

std::string path_from(nb::handle path) {
  const nb::object text = nb::steal(PyOS_FSPath(path.ptr()));
  if (!text.is_valid()) PyErr_Clear();
  check_argument(text.is_valid() && PyUnicode_Check(text.ptr()), "path is {}, must be a path",
                 value_text(path));
  return string_from(text, "path");
}

EngineOptions options_from(nb::handle path, const nb::kwargs& arguments) {
  EngineOptions options;
  options.model_path = path_from(path);
  set_fields(options, arguments, "EngineOptions");
  const bool given = arguments.contains("kv_dtype") && !nb::object(arguments["kv_dtype"]).is_none();
  if (!given && options.device != "cpu") options.kv_dtype = DType::bf16;
  return options;
}

std::unique_ptr<SharedEngine> load(nb::handle path, const nb::kwargs& arguments) {
  const EngineOptions options = options_from(path, arguments);
  const nb::gil_scoped_release release;
  return std::make_unique<SharedEngine>(Engine::load(options));
}

std::string explain(nb::handle path, nb::handle device, const nb::kwargs& arguments) {
  const DeviceInfo* elsewhere = nullptr;
  if (!nb::try_cast(device, elsewhere)) elsewhere = nullptr;
  nb::kwargs all = nb::steal<nb::kwargs>(PyDict_Copy(arguments.ptr()));
  all["device"] =
      elsewhere != nullptr ? nb::str(device_name(elsewhere->device()).c_str()) : nb::str(device);
  const EngineOptions options = options_from(path, all);
  std::optional<DeviceInfo> described;
  if (elsewhere != nullptr) described = *elsewhere;
  const nb::gil_scoped_release release;
  return Engine::plan(options, described).explain();
}

}  // namespace

template <>
std::span<const Field<EngineOptions>> fields_of<EngineOptions>() {
  using Options = EngineOptions;
  static constexpr Field<Options> table[] = {
      field<&Options::random_weights>("random_weights"),
      field<&Options::device>("device"),
      wish<&Options::backend>("backend"),
      wish<&Options::decode_backend>("decode_backend"),
      field<&Options::kv_dtype>("kv_dtype"),
      field<&Options::kv_scale>("kv_scale"),
      field<&Options::page_size>("page_size"),
      field<&Options::kv_memory_bytes>("kv_memory_bytes"),
      field<&Options::max_requests>("max_requests"),
      field<&Options::max_batch_tokens>("max_batch_tokens"),
      field<&Options::max_mixed_tokens>("max_mixed_tokens"),
      field<&Options::max_context>("max_context"),
      field<&Options::threads>("threads"),
      field<&Options::prefix_cache>("prefix_cache"),
      field<&Options::batch_invariant>("batch_invariant"),
      field<&Options::cuda_graphs>("cuda_graphs"),
      field<&Options::max_graph_requests>("max_graph_requests"),
      field<&Options::prefix_levels>("prefix_levels"),
      field<&Options::min_prefix_savings>("min_prefix_savings"),
      field<&Options::workspace_budget>("workspace_budget"),
      field<&Options::overlap>("overlap"),
      field<&Options::speculate>("speculate"),
      field<&Options::max_drafts>("max_drafts"),
      field<&Options::draft_branches>("draft_branches"),
      field<&Options::always_speculate>("always_speculate")};
  return table;
}

void bind_loading(nb::module_& module, nb::class_<SharedEngine>& engine) {
  engine.def_static(
      "load", &load, nb::arg("path"), nb::arg("arguments"),
      nb::sig("def load(path: str | os.PathLike, *, random_weights: int | None = None, device: str "
              "= 'cpu', backend: str = 'auto', decode_backend: str | None = None, kv_dtype: DType "
              "| str | None = None, kv_scale: KvScale | str = 'none', page_size: int = 16, "
              "kv_memory_bytes: int = 0, max_requests: int = 32, max_batch_tokens: int = 512, "
              "max_mixed_tokens: int = 0, max_context: int = 0, threads: int = 0, prefix_cache: "
              "bool = True, batch_invariant: bool = False, cuda_graphs: bool = True, "
              "max_graph_requests: int = 256, prefix_levels: int = 2, min_prefix_savings: int | "
              "None = None, workspace_budget: int = ..., overlap: bool | None = None, speculate: "
              "str = '', max_drafts: int = 4, draft_branches: int = 1, always_speculate: bool = "
              "False) -> Engine"),
      "Loads a checkpoint folder. Options are those of EngineOptions; kv_dtype None is fp32, on a "
      "GPU bf16.");
  module.def("explain", &explain, nb::arg("path"), nb::arg("device") = "cpu", nb::arg("arguments"),
             nb::sig("def explain(path: str | os.PathLike, device: DeviceInfo | str = 'cpu', "
                     "**options: typing.Any) -> str"),
             "Describes the backends and the memory that Engine.load(path, **options) would "
             "choose, without loading. A DeviceInfo describes a GPU that need not be here; "
             "kv_memory_bytes must then be given.");
}

}  // namespace fovea::python
