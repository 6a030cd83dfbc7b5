// SPDX-License-Identifier: Apache-2.0
// Merging of attention over disjoint sets of keys.
#include <mutex>

#include "fovea/merge_states.h"
#include "python/bindings/array.h"
#include "python/bindings/devices.h"
#include "python/bindings/keywords.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

// A StateMerger with its threads. Calls on one object wait for each other.
struct Merger {
  StateShape shape;
  Device device;
  std::shared_ptr<ThreadPool> threads;
  std::mutex mutex;
  std::unique_ptr<StateMerger> merger;
};

enum Argument : size_t { kDtype, kHeads, kDim, kDevice, kThreads, kArguments };
constexpr const char* kNames[kArguments] = {"dtype", "heads", "dim", "device", "threads"};

void make_merger(Merger* self, const nb::kwargs& keywords) {
  static const Keywords<kArguments> names(kNames);
  const auto arguments = names.read(keywords, "StateMerger");
  for (const Argument needed : {kDtype, kHeads, kDim}) {
    check_argument(arguments[needed].is_valid(), "{} is missing", kNames[needed]);
  }
  const StateShape shape{enum_from<DType>(arguments[kDtype], kNames[kDtype]),
                         integer_from<int32_t>(arguments[kHeads], kNames[kHeads]),
                         integer_from<int32_t>(arguments[kDim], kNames[kDim])};
  const Device device =
      arguments[kDevice].is_valid() ? device_from(arguments[kDevice], kNames[kDevice]) : Device{};
  std::shared_ptr<ThreadPool> threads;
  if (device.kind == DeviceKind::cpu) threads = threads_from(arguments[kThreads], "threads");
  auto merger = make_state_merger(shape, device, threads.get());
  new (self) Merger{shape, device, std::move(threads), {}, std::move(merger)};
}

// One state of a merge: its arrays, and how many tokens they hold.
class StateReader {
 public:
  StateReader(const Merger& merger, nb::handle out, nb::handle lse, const char* out_name,
              const char* lse_name, bool writable)
      : out_(out, out_name, 1), lse_(lse, lse_name, 1) {
    const auto& [dtype, heads, dim] = merger.shape;
    const std::string shape = fmt::format("[tokens, {}, {}]", heads, dim);
    out_.check_dimensions(3, shape.c_str());
    out_.check_extent(1, heads, shape.c_str());
    out_.check_extent(2, dim, shape.c_str());
    out_.check_dtype(dtype);
    out_.check_last_axis();
    lse_.check_dimensions(2, "[tokens, heads]");
    lse_.check_extent(1, heads, "[tokens, heads]");
    lse_.check_dtype(DType::f32);
    lse_.check_dense();
    for (const Array* array : {&out_, &lse_}) {
      array->check_device(merger.device);
      if (writable) array->check_writable();
    }
    const int64_t row = int64_t{heads} * dim;
    state_.out = {out_.data(), dtype, out_.extent(0) > 1 ? out_.stride(0) : row,
                  heads > 1 ? out_.stride(1) : dim};
    state_.lse = NaturalLse(reinterpret_cast<float*>(lse_.data()));
  }

  const AttentionState& state() const { return state_; }
  int64_t tokens() const { return out_.extent(0); }
  const DlExchangeApi* api() const { return out_.exchange_api(); }
  void check_tokens(int64_t tokens) const {
    for (const Array* array : {&out_, &lse_}) {
      check_argument(array->extent(0) >= tokens, "{} has {} rows, must have {}", array->name(),
                     array->extent(0), tokens);
    }
  }

 private:
  Array out_, lse_;
  AttentionState state_;
};

struct MergeOptions {
  nb::handle tokens, stream;
};

void merge(Merger& self, const StateReader& into, const StateReader& part,
           const MergeOptions& options) {
  const int64_t tokens =
      options.tokens.is_none() ? into.tokens() : integer_from<int64_t>(options.tokens, "tokens");
  check_argument(tokens >= 0, "tokens is {}, must not be negative", tokens);
  into.check_tokens(tokens);
  part.check_tokens(tokens);
  const Stream stream = stream_from(options.stream, self.device, into.api());
  const nb::gil_scoped_release release;
  const std::lock_guard lock(self.mutex);
  self.merger->merge(into.state(), part.state(), tokens, stream);
}

}  // namespace

void bind_merger(nb::module_& module) {
  nb::class_<Merger>(module, "StateMerger",
                     "Merges attention over disjoint sets of keys: (out, lse) of each, lse the "
                     "natural logarithm.",
                     nb::is_final())
      .def("__init__", &make_merger,
           nb::sig("def __init__(self, *, dtype: DType | str, heads: int, dim: int, device: Device "
                   "| str = 'cpu', threads: ThreadPool | int | None = None) -> None"))
      .def(
          "merge",
          [](Merger& self, nb::handle out, nb::handle lse, nb::handle part_out, nb::handle part_lse,
             nb::handle tokens, nb::handle stream) {
            const StateReader into(self, out, lse, "out", "lse", true);
            const StateReader part(self, part_out, part_lse, "part_out", "part_lse", false);
            merge(self, into, part, {tokens, stream});
          },
          nb::arg("out"), nb::arg("lse"), nb::arg("part_out"), nb::arg("part_lse"), nb::kw_only(),
          nb::arg("tokens") = nb::none(), nb::arg("stream") = nb::none(),
          nb::sig("def merge(self, out: Array, lse: Array, part_out: Array, part_lse: Array, *, "
                  "tokens: int | None = None, stream: typing.Any = None) -> None"),
          "Turns (out, lse) into the state over the keys of both. out and part_out [tokens, heads, "
          "dim]; lse and part_lse f32 [tokens, heads], dense. tokens: None means all rows of out.");
}

}  // namespace fovea::python
