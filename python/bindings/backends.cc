// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/backends.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <chrono>

#include "python/bindings/batches.h"
#include "python/bindings/devices.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

// The tensors of one layer of a backend, checked once.
struct BoundLayer {
  nb::object backend;
  LayerInput input;
};

}  // namespace

AttentionBackend& Backend::get() const {
  check_argument(backend_ != nullptr, "the backend is part of a composition, use that instead");
  return *backend_;
}

std::unique_ptr<AttentionBackend> Backend::release() {
  get();
  batch_ = nb::object();
  return std::move(backend_);
}

void Backend::reserve(const BatchLimits& limits, nb::handle workspace) {
  AttentionBackend& backend = get();
  Keeper keeper;
  std::span<std::byte> bytes;
  if (is_given(workspace)) {
    Array array(workspace, "workspace");
    array.check_device(backend.device());
    array.check_dense();
    array.check_writable();
    // An empty span would mean that the backend allocates.
    check_argument(array.bytes() > 0,
                   "workspace is empty, must have {} bytes; None: the backend "
                   "allocates its own",
                   backend.workspace_bytes(limits));
    bytes = {reinterpret_cast<std::byte*>(array.data()), static_cast<size_t>(array.bytes())};
    keeper.keep(array);
  }
  {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    tokens_ = 0;
    backend.reserve(limits, bytes);
    limits_ = limits;
  }
  workspace_ = nb::borrow(workspace);
  std::swap(keeper_, keeper);
}

void Backend::plan(nb::handle batch, nb::handle stream_object) {
  AttentionBackend& backend = get();
  const Batch* view = nullptr;
  check_argument(nb::try_cast(batch, view) && view != nullptr, "batch is {}, must be a Batch",
                 type_text(batch));
  check_argument(!view->has_arrays || view->device == backend.device(),
                 "the batch is on {}, the backend on {}", device_name(view->device),
                 device_name(backend.device()));
  const Stream stream = stream_from(stream_object, backend.device(), view->api);
  // A failed plan leaves none, so the old batch is not needed either way. It must outlive the lock.
  const nb::object before = std::move(batch_);
  batch_ = nb::borrow(batch);
  const nb::gil_scoped_release release;
  const std::lock_guard lock(mutex_);
  tokens_ = 0;
  backend.plan(view->view, stream);
  tokens_ = view->view.tokens;
}

void Backend::forward(const LayerInput& input, Stream stream) {
  AttentionBackend& backend = get();
  const nb::gil_scoped_release release;
  const std::lock_guard lock(mutex_);
  if (tokens_ > input.rows) {
    fail(ErrorCode::invalid_argument, "{} has {} rows, the planned batch has {} tokens",
         input.shortest, input.rows, tokens_);
  }
  backend.forward(input.tensors, stream);
}

namespace {

void forward_layer(Backend& self, nb::handle layer, const nb::kwargs& arguments) {
  LayerInput input;
  nb::handle stream;
  const LayerShape shape = self.shape();
  read_layer(arguments, shape, input, false, &stream);
  input.tensors.layer = integer_from<int32_t>(layer, "layer");
  self.forward(input, stream_from(stream, shape.device, input.api));
}

// Is forward() for fovea.torch, whose op calls it in every layer.
void forward_rows(Backend& self, nb::handle layer, nb::handle q, nb::handle k, nb::handle v,
                  nb::handle out) {
  LayerInput input;
  const LayerShape shape = self.shape();
  read_rows({q, k, v, out}, shape, input);
  input.tensors.layer = integer_from<int32_t>(layer, "layer");
  self.forward(input, stream_from({}, shape.device, input.api));
}

BoundLayer bind_layer(const nb::pointer_and_handle<Backend>& self, nb::handle layer,
                      const nb::kwargs& arguments) {
  BoundLayer bound{.backend = nb::borrow(self.h), .input = {}};
  read_layer(arguments, self.p->shape(), bound.input, true, nullptr);
  bound.input.tensors.layer = integer_from<int32_t>(layer, "layer");
  return bound;
}

void forward_bound(const BoundLayer& self, nb::handle stream) {
  Backend& backend = nb::cast<Backend&>(self.backend);
  backend.forward(self.input, stream_from(stream, backend.get().device(), self.input.api));
}

// Returns the seconds that the calls take without Python, for bench/python_overhead.py.
double time_bound(const BoundLayer& self, nb::handle count, nb::handle stream_object) {
  const Backend& backend = nb::cast<Backend&>(self.backend);
  const int64_t calls = integer_from<int64_t>(count, "count");
  const Stream stream = stream_from(stream_object, backend.get().device(), self.input.api);
  AttentionBackend& attention = backend.get();
  const nb::gil_scoped_release release;
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) attention.forward(self.input.tensors, stream);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

std::unique_ptr<Backend> compose(nb::handle prefill, nb::handle decode, nb::handle verify) {
  Backend *first = nullptr, *second = nullptr;
  check_argument(nb::try_cast(prefill, first) && first != nullptr,
                 "prefill is {}, must be a Backend", type_text(prefill));
  check_argument(nb::try_cast(decode, second) && second != nullptr,
                 "decode is {}, must be a Backend", type_text(decode));
  check_argument(first != second, "decode is the same backend as prefill");
  check_argument(first->spec() == second->spec(), "prefill and decode have different specs");
  check_argument(&first->get() != nullptr && &second->get() != nullptr, "a backend is absent");
  check_argument(first->parts().kv.is(second->parts().kv), "prefill and decode have two pools");
  const Phase phase = enum_from<Phase>(verify, "verify");
  BackendParts parts = first->parts();
  if (parts.threads == nullptr) parts.threads = second->parts().threads;
  auto both = compose_by_phase(first->release(), second->release(), phase);
  return std::make_unique<Backend>(first->spec(), std::move(parts), std::move(both));
}

constexpr const char* kTensors =
    "q: Array | None = None, k: Array | None = None, v: Array | None = None, out: Array | None = "
    "None, lse: Array | None = None, q_scale: Array | None = None, save_kv: bool = True, sinks: "
    "Array | None = None, alibi_slopes: Array | None = None, rope: RotaryTensors | None = None, "
    "q_succ: Array | None = None, q_inter: Array | None = None, latent: Array | None = None, "
    "k_rope: Array | None = None, q_rope: Array | None = None, w_uk: Array | None = None, w_uv: "
    "Array | None = None, mixed: Array | None = None, conv_weight: Array | None = None, conv_bias: "
    "Array | None = None, log_decay: Array | None = None, beta: Array | None = None, skip: Array | "
    "None = None, l2_normalise_qk: bool = False, plain_conv: bool = False";

constexpr const char* kForwardDoc =
    "Runs one layer of the planned batch: stores k and v, attends, writes out and, if given, lse. "
    "Rows beyond the batch's tokens may exist and stay untouched.\n\n"
    "q [tokens, q_heads, head_dim] of the spec's q_dtype; k [tokens, kv_heads, head_dim], v "
    "[tokens, kv_heads, head_dim_v] and out [tokens, q_heads, head_dim_v] of the same, with an fp8 "
    "q of bf16; lse f32 [tokens, q_heads], dense, natural logarithm, needs spec.needs_lse; q_scale "
    "f32 [1], [tokens], [1, q_heads] or [tokens, q_heads]; sinks and alibi_slopes f32 [q_heads].\n"
    "mla: q [tokens, q_heads, kv_lora_rank + rope_dim] or, with weights, [.., nope_dim + "
    "rope_dim], without the rope_dim values if q_rope [tokens, q_heads, rope_dim] holds them; "
    "latent [tokens, kv_lora_rank]; k_rope [tokens, rope_dim]; w_uk [q_heads, nope_dim, "
    "kv_lora_rank]; w_uv [q_heads, v_dim, kv_lora_rank]; out [tokens, q_heads, v_dim or "
    "kv_lora_rank].\n"
    "dual chunk attention without has_rope: q_succ and q_inter, of q's shape.\n"
    "linear, f32 and dense: mixed [tokens, conv_dim]; conv_weight [conv_dim, conv_width]; "
    "conv_bias [conv_dim]; log_decay and beta [tokens, value_heads], but kda: log_decay [tokens, "
    "value_heads, key_dim], lightning: log_decay [value_heads] and no beta, mamba1: log_decay "
    "[value_heads, key_dim]; skip [value_heads]; out [tokens, value_heads, value_dim]. Layers of "
    "mamba1 make two calls: one with conv_weight, of which out is the convolution of mixed "
    "[tokens, value_heads], then the scan. short_conv has the first of them only.\n"
    "The arrays are borrowed: on a GPU they must live until the work has run.";

void bind_backend(nb::module_& module) {
  static const std::string forward_signature = fmt::format(
      "def forward(self, layer: int = 0, *, {}, stream: typing.Any = None) -> None", kTensors);
  static const std::string bind_signature =
      fmt::format("def bind(self, layer: int = 0, *, {}) -> BoundLayer", kTensors);
  nb::class_<Backend>(
      module, "Backend",
      "One attention implementation over one pool. Calls on one object wait for each other and "
      "release the GIL. On a GPU, plan() and forward() only enqueue work, and a CUDA graph may "
      "capture both. stream is an address, an object with cuda_stream or __cuda_stream__, or None: "
      "the stream that the arrays' library works on, else the default stream.",
      nb::is_final(), nb::is_weak_referenceable())
      .def_prop_ro("name", [](const Backend& self) { return std::string(self.get().name()); })
      .def_prop_ro("device", [](const Backend& self) { return self.get().device(); })
      .def_prop_ro("spec", &Backend::spec, nb::rv_policy::copy)
      .def_prop_ro("kv", [](const Backend& self) { return self.parts().kv; })
      .def_prop_ro("state", [](const Backend& self) { return self.parts().state; })
      .def_prop_ro("limits", &Backend::limits, "The limits of the last reserve(), or None.",
                   nb::rv_policy::copy)
      .def(
          "workspace_bytes",
          [](const Backend& self, nb::handle limits) {
            return self.get().workspace_bytes(value_from<BatchLimits>(limits, "limits"));
          },
          nb::arg("limits"),
          "Returns the exact maximum over all batches within the limits, in bytes.")
      .def(
          "reserve",
          [](Backend& self, nb::handle limits, nb::handle workspace) {
            self.reserve(value_from<BatchLimits>(limits, "limits"), workspace);
          },
          nb::arg("limits"), nb::arg("workspace") = nb::none(),
          "Fixes every buffer. workspace: a dense array of the device, of workspace_bytes(limits) "
          "bytes or more, 64-byte aligned, which the backend keeps; None: the backend allocates.")
      .def("plan", &Backend::plan, nb::arg("batch"), nb::arg("stream") = nb::none(),
           "Builds indices and divides the work, once per forward pass. The backend keeps the "
           "batch until the next plan().")
      .def("forward", &forward_layer, nb::arg("layer") = 0, nb::arg("arguments"),
           nb::sig(forward_signature.c_str()), kForwardDoc)
      // Named arguments would cost time in each call.
      .def("_forward_rows", &forward_rows, "Is forward(layer, q=, k=, v=, out=) by position.")
      .def("bind", &bind_layer, nb::arg("layer") = 0, nb::arg("arguments"),
           nb::sig(bind_signature.c_str()),
           "Checks and keeps the arrays of a forward() that is called often. They stay in place; "
           "their rows may exceed the tokens of later batches.")
      .def("__repr__", [](const Backend& self) {
        return fmt::format("<fovea.Backend '{}' on {}>", self.get().name(),
                           device_name(self.get().device()));
      });
}

}  // namespace

void bind_backends(nb::module_& module) {
  bind_backend(module);
  nb::class_<BoundLayer>(module, "BoundLayer",
                         "The checked tensors of one layer, made by Backend.bind(). It keeps "
                         "references to them.",
                         nb::is_final())
      .def("forward", &forward_bound, nb::arg("stream") = nb::none(),
           "Runs the layer on the planned batch.")
      .def("time", &time_bound, nb::arg("count"), nb::arg("stream") = nb::none(),
           nb::sig("def time(self, count: int, stream: typing.Any = None) -> float"),
           "Returns the seconds that `count` calls of forward() take in C++, to compare.");
  module.def("compose_by_phase", &compose, nb::arg("prefill"), nb::arg("decode"),
             nb::arg("verify") = "prefill",
             nb::sig("def compose_by_phase(prefill: Backend, decode: Backend, verify: Phase | str "
                     "= 'prefill') -> Backend"),
             "Composes two backends over one pool: `decode` plans decode batches, `verify` names "
             "the one for target_verify, `prefill` plans the others. The arguments cannot be used "
             "any more.");
}

}  // namespace fovea::python
