// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/batches.h"

#include "python/bindings/keywords.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

enum Argument : size_t {
  kMode,
  kRequests,
  kTokens,
  kQIndptr,
  kKvLens,
  kRequestRows,
  kTable,
  kEntryTokens,
  kOutSlots,
  kPositions,
  kTreeAncestors,
  kCustomVisible,
  kCustomIndptr,
  kSpanBounds,
  kSpanIndptr,
  kItemPrefixLens,
  kItemTokenPos,
  kCrossLens,
  kCrossTable,
  kCrossEntryTokens,
  kStateSlots,
  kSnapshotSlots,
  kDraftCounts,
  kMaxQLen,
  kMaxKvLen,
  kHostQLens,
  kHostKvLens,
  kSharedPrefix,
  kPrefixWritten,
  kArguments
};

constexpr const char* kNames[kArguments] = {
    "mode",           "requests",       "tokens",         "q_indptr",
    "kv_lens",        "request_rows",   "table",          "entry_tokens",
    "out_slots",      "positions",      "tree_ancestors", "custom_visible",
    "custom_indptr",  "span_bounds",    "span_indptr",    "item_prefix_lens",
    "item_token_pos", "cross_lens",     "cross_table",    "cross_entry_tokens",
    "state_slots",    "snapshot_slots", "draft_counts",   "max_q_len",
    "max_kv_len",     "host_q_lens",    "host_kv_lens",   "shared_prefix",
    "prefix_written"};

// Reads the arguments of one batch.
class BatchReader {
 public:
  BatchReader(Batch& batch, const nb::kwargs& arguments) : batch_(batch) {
    static const Keywords<kArguments> keywords(kNames);
    arguments_ = keywords.read(arguments, "Batch");
  }

  void read() {
    BatchView& view = batch_.view;
    check_argument(arguments_[kMode].is_valid(), "mode is missing");
    view.mode = enum_from<ForwardMode>(arguments_[kMode], kNames[kMode]);
    view.q_indptr = array<int32_t>(kQIndptr);
    view.kv_lens = array<int32_t>(kKvLens);
    view.request_rows = array<int32_t>(kRequestRows);
    view.table = table(kTable, kEntryTokens);
    view.out_slots = array<int64_t>(kOutSlots);
    view.positions = array<int32_t>(kPositions);
    read_masks(view.masks);
    view.cross = {array<int32_t>(kCrossLens), table(kCrossTable, kCrossEntryTokens)};
    view.linear = {array<int32_t>(kStateSlots), array<int32_t>(kSnapshotSlots),
                   array<int32_t>(kDraftCounts)};
    read_hints(view.hints);
    view.requests = requests();
    view.tokens = tokens();
  }

 private:
  // Elements of the width of T, signed or not; bytes also as bool.
  template <typename T>
  static bool is_element(DlType dtype) {
    const bool integer = dtype.code == kDlInt || dtype.code == kDlUint;
    const bool boolean = dtype.code == kDlBool && sizeof(T) == 1;
    const bool sign =
        sizeof(T) == 4 || sizeof(T) == 8 || dtype.code != kDlInt || !std::is_same_v<T, uint8_t>;
    return (integer || boolean) && sign && dtype.bits == 8 * sizeof(T);
  }

  template <typename T>
  static const char* element_name() {
    if constexpr (sizeof(T) == 8) return "int64";
    if constexpr (sizeof(T) == 4) return "int32";
    if constexpr (sizeof(T) == 2) return "uint16";
    return "uint8 or bool";
  }

  // Checks the device, and keeps the array.
  void take(Array& array, nb::handle source, bool host) {
    if (host) {
      array.check_host();
    } else if (!batch_.has_arrays) {
      batch_.device = device_of(array.device());
      batch_.has_arrays = true;
      batch_.api = array.exchange_api();
    } else {
      array.check_device(batch_.device);
    }
    batch_.keeper.keep(array);
    batch_.keeper.keep(source);
  }

  template <typename T>
  void check_elements(const Array& array) {
    check_argument(is_element<T>(array.dtype()), "{} has dtype {}, must be {}", array.name(),
                   dtype_text(array.dtype()), element_name<T>());
    check_argument(reinterpret_cast<uintptr_t>(array.data()) % sizeof(T) == 0,
                   "{} is at {}, must be aligned to {} bytes", array.name(),
                   static_cast<const void*>(array.data()), sizeof(T));
  }

  template <typename T>
  std::span<const T> array(Argument argument, bool host = false, bool any_shape = false) {
    const nb::handle source = arguments_[argument];
    if (!source.is_valid()) return {};
    Array array(source, kNames[argument]);
    if (!any_shape) array.check_dimensions(1, "[count]");
    check_elements<T>(array);
    array.check_dense();
    take(array, source, host);
    return {reinterpret_cast<const T*>(array.data()), static_cast<size_t>(array.elements())};
  }

  // Reads an array [rows, stride] or a RequestTable.
  TokenTable table(Argument argument, Argument entry_tokens) {
    const nb::handle source = arguments_[argument];
    if (!source.is_valid()) return {};
    RequestTable* requests = nullptr;
    if (nb::try_cast(source, requests) && requests != nullptr) {
      check_argument(!arguments_[entry_tokens].is_valid() || integer(entry_tokens, 1) == 1,
                     "{} is {}, a RequestTable has entries of 1", kNames[entry_tokens],
                     integer(entry_tokens, 1));
      batch_.keeper.keep(source);
      return requests->table();
    }
    Array array(source, kNames[argument]);
    array.check_dimensions(2, "[rows, stride]");
    check_elements<int32_t>(array);
    array.check_last_axis();
    take(array, source, false);
    const bool one_row = array.extent(0) <= 1;
    return {.entries = reinterpret_cast<const int32_t*>(array.data()),
            .stride = one_row ? array.extent(1) : array.stride(0),
            .entry_tokens = integer(entry_tokens, 1),
            .rows = static_cast<int32_t>(array.extent(0))};
  }

  int32_t integer(Argument argument, int32_t otherwise) {
    const nb::handle value = arguments_[argument];
    return value.is_valid() ? integer_from<int32_t>(value, kNames[argument]) : otherwise;
  }

  void read_masks(BatchMasks& masks) {
    masks.tree.ancestors = array<uint64_t>(kTreeAncestors);
    masks.custom.visible = array<uint8_t>(kCustomVisible);
    masks.custom.indptr = array<int64_t>(kCustomIndptr);
    masks.spans.bounds = array<int32_t>(kSpanBounds, false, true);
    masks.spans.indptr = array<int32_t>(kSpanIndptr);
    masks.items.prefix_lens = array<uint32_t>(kItemPrefixLens);
    const nb::handle source = arguments_[kItemTokenPos];
    if (!source.is_valid()) return;
    Array items(source, kNames[kItemTokenPos]);
    items.check_dimensions(2, "[requests, stride]");
    check_elements<uint16_t>(items);
    items.check_dense();
    take(items, source, false);
    masks.items.token_pos = {reinterpret_cast<const uint16_t*>(items.data()),
                             static_cast<size_t>(items.elements())};
    masks.items.stride = items.extent(1);
  }

  void read_hints(BatchHints& hints) {
    hints.max_q_len = integer(kMaxQLen, 0);
    hints.max_kv_len = integer(kMaxKvLen, 0);
    hints.host_q_lens = array<int32_t>(kHostQLens, true);
    hints.host_kv_lens = array<int32_t>(kHostKvLens, true);
    hints.shared_prefix = array<int32_t>(kSharedPrefix);
    const nb::handle written = arguments_[kPrefixWritten];
    hints.prefix_written = written.is_valid() && bool_from(written, kNames[kPrefixWritten]);
  }

  int32_t requests() {
    const BatchView& view = batch_.view;
    size_t count = 0;
    if (!view.kv_lens.empty()) {
      count = view.kv_lens.size();
    } else if (!view.q_indptr.empty()) {
      count = view.q_indptr.size() - 1;
    }
    return integer(kRequests, static_cast<int32_t>(count));
  }

  int32_t tokens() {
    const BatchView& view = batch_.view;
    if (arguments_[kTokens].is_valid()) return integer(kTokens, 0);
    if (view.mode == ForwardMode::idle) return 0;
    if (!view.out_slots.empty()) return static_cast<int32_t>(view.out_slots.size());
    if (!view.positions.empty()) return static_cast<int32_t>(view.positions.size());
    if (view.mode == ForwardMode::decode) return view.requests;
    check_argument(batch_.device.kind == DeviceKind::cpu,
                   "tokens is missing: on a GPU the batch has neither out_slots nor positions to "
                   "tell it");
    const auto last = static_cast<size_t>(view.requests);
    return view.requests >= 0 && last < view.q_indptr.size() ? view.q_indptr[last] : 0;
  }

  Batch& batch_;
  std::array<nb::handle, kArguments> arguments_;
};

}  // namespace

void bind_batches(nb::module_& module) {
  nb::class_<Batch>(
      module, "Batch",
      "One forward pass over several requests. It keeps references to its arrays, which live on "
      "the backend's device.\n\n"
      "q_indptr int32 [requests + 1]; kv_lens and request_rows int32 [requests]; table int32 "
      "[rows, stride] of slots, or of pages with entry_tokens = page_size, or a RequestTable; "
      "out_slots int64 [tokens]; positions int32 [tokens]; tree_ancestors int64 [tokens]; "
      "custom_visible uint8 or bool [bytes], custom_indptr int64 [requests + 1]; span_bounds int32 "
      "[spans, 2], span_indptr int32 [requests + 1]; item_prefix_lens int32 [requests], "
      "item_token_pos uint16 [requests, stride]; cross_lens int32 [requests], cross_table as "
      "table; state_slots int32 [requests]; snapshot_slots int32 [tokens]; draft_counts int32 "
      "[requests]; host_q_lens and host_kv_lens int32 [requests] in host memory; shared_prefix "
      "int32 [requests].\n\n"
      "requests defaults to the length of kv_lens, else to that of q_indptr less 1. tokens "
      "defaults to the length of out_slots or positions, to requests in mode decode, and on the "
      "CPU to the last entry of q_indptr.",
      nb::is_final())
      .def(
          "__init__",
          [](Batch* self, const nb::kwargs& arguments) {
            new (self) Batch();
            try {
              BatchReader(*self, arguments).read();
            } catch (...) {
              self->~Batch();
              throw;
            }
          },
          nb::sig("def __init__(self, *, mode: ForwardMode | str, requests: int | None = None, "
                  "tokens: int | None = None, q_indptr: Array | None = None, kv_lens: Array | None "
                  "= None, request_rows: Array | None = None, table: Array | RequestTable | None = "
                  "None, entry_tokens: int = 1, out_slots: Array | None = None, positions: Array | "
                  "None = None, tree_ancestors: Array | None = None, custom_visible: Array | None "
                  "= None, custom_indptr: Array | None = None, span_bounds: Array | None = None, "
                  "span_indptr: Array | None = None, item_prefix_lens: Array | None = None, "
                  "item_token_pos: Array | None = None, cross_lens: Array | None = None, "
                  "cross_table: Array | RequestTable | None = None, cross_entry_tokens: int = 1, "
                  "state_slots: Array | None = None, snapshot_slots: Array | None = None, "
                  "draft_counts: Array | None = None, max_q_len: int = 0, max_kv_len: int = 0, "
                  "host_q_lens: Array | None = None, host_kv_lens: Array | None = None, "
                  "shared_prefix: Array | None = None, prefix_written: bool = False) -> None"))
      .def_prop_ro("mode", [](const Batch& self) { return self.view.mode; })
      .def_prop_ro("requests", [](const Batch& self) { return self.view.requests; })
      .def_prop_ro("tokens", [](const Batch& self) { return self.view.tokens; })
      .def_prop_ro("device", [](const Batch& self) { return self.device; })
      .def("__repr__", [](const Batch& self) {
        return fmt::format("Batch(mode='{}', requests={}, tokens={})",
                           enumerators<ForwardMode>()[static_cast<size_t>(self.view.mode)].text,
                           self.view.requests, self.view.tokens);
      });
}

}  // namespace fovea::python
