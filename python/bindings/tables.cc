// SPDX-License-Identifier: Apache-2.0
// Request tables and page allocators.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "fovea/kv_cache.h"
#include "python/bindings/array.h"
#include "python/bindings/layer_array.h"
#include "python/bindings/module.h"
#include "python/bindings/values.h"

namespace fovea::python {
namespace {

using TableHandle = nb::pointer_and_handle<RequestTable>;

void write_slots(RequestTable& table, nb::handle row, nb::handle first, nb::handle slots) {
  const int32_t index = integer_from<int32_t>(row, "row");
  const int32_t begin = integer_from<int32_t>(first, "first");
  const std::vector<int32_t> values = integers_of<int32_t>(slots, "slots");
  const std::span<int32_t> entries = table.row(index);
  check_argument(begin >= 0 && begin <= table.max_context(), "first is {}, must be in [0, {}]",
                 begin, table.max_context());
  check_argument(values.size() <= entries.size() - static_cast<size_t>(begin),
                 "slots has {} entries from position {} on, a row has {}", values.size(), begin,
                 entries.size());
  std::ranges::copy(values, entries.begin() + begin);
  table.mark_changed(index, begin);
}

void bind_request_table(nb::module_& module) {
  nb::class_<RequestTable>(module, "RequestTable",
                           "The slots of each request's tokens, int32 [max_requests, max_context] "
                           "in host memory; row 0 is the dummy.",
                           nb::is_final())
      .def(
          "__init__",
          [](RequestTable* self, nb::handle max_requests, nb::handle max_context) {
            new (self) RequestTable(integer_from<int32_t>(max_requests, "max_requests"),
                                    integer_from<int32_t>(max_context, "max_context"));
          },
          nb::arg("max_requests"), nb::arg("max_context"))
      .def("allocate", &RequestTable::allocate, "Returns a free row; None: all rows are in use.")
      .def(
          "release",
          [](RequestTable& self, nb::handle row) {
            self.release(integer_from<int32_t>(row, "row"));
          },
          nb::arg("row"), "Clears the row.")
      .def(
          "row",
          [](const TableHandle& self, nb::handle row) {
            const std::span<int32_t> slots = self.p->row(integer_from<int32_t>(row, "row"));
            return dense_array(self.h, slots.data(), DType::i32,
                               {static_cast<int64_t>(slots.size())});
          },
          nb::arg("row"), "Returns the writable row, int32 [max_context].")
      .def("write", &write_slots, nb::arg("row"), nb::arg("first"), nb::arg("slots"),
           "Writes the slots of tokens from position `first` on, and marks the row as changed.")
      .def(
          "mark_changed",
          [](RequestTable& self, nb::handle row, nb::handle first) {
            self.mark_changed(integer_from<int32_t>(row, "row"),
                              integer_from<int32_t>(first, "first"));
          },
          nb::arg("row"), nb::arg("first"))
      .def(
          "take_changed",
          [](RequestTable& self, nb::handle row) {
            return self.take_changed(integer_from<int32_t>(row, "row"));
          },
          nb::arg("row"),
          "Returns the first position that changed since the last call for the row; max_context: "
          "none.")
      .def_prop_ro("table",
                   [](const TableHandle& self) {
                     return dense_array(self.h, self.p->data(), DType::i32,
                                        {self.p->max_requests(), self.p->max_context()});
                   })
      .def_prop_ro("max_requests", &RequestTable::max_requests)
      .def_prop_ro("max_context", &RequestTable::max_context)
      .def_prop_ro("available", &RequestTable::available);
}

void bind_page_allocator(nb::module_& module) {
  using Slots = std::optional<std::vector<int64_t>>;
  nb::class_<PageAllocator>(module, "PageAllocator",
                            "Free pages and reference counts of one pool. Page 0 is reserved.",
                            nb::is_final())
      .def(
          "__init__",
          [](PageAllocator* self, nb::handle pages, nb::handle page_size) {
            new (self) PageAllocator(integer_from<int64_t>(pages, "pages"),
                                     integer_from<int32_t>(page_size, "page_size"));
          },
          nb::arg("pages"), nb::arg("page_size"))
      .def(
          "extend",
          [](PageAllocator& self, nb::handle prefix, nb::handle length,
             nb::handle last_slot) -> Slots {
            std::vector<int64_t> slots;
            const bool fits = self.extend(integer_from<int32_t>(prefix, "prefix"),
                                          integer_from<int32_t>(length, "length"),
                                          integer_from<int64_t>(last_slot, "last_slot"), slots);
            return fits ? Slots(std::move(slots)) : std::nullopt;
          },
          nb::arg("prefix"), nb::arg("length"), nb::arg("last_slot") = -1,
          "Returns the slots of tokens [prefix, length) of a request whose token prefix - 1 is in "
          "last_slot; None, and nothing is taken: too few pages.")
      .def(
          "allocate",
          [](PageAllocator& self, nb::handle count) -> Slots {
            std::vector<int64_t> pages;
            const bool fits = self.allocate(integer_from<int64_t>(count, "count"), pages);
            return fits ? Slots(std::move(pages)) : std::nullopt;
          },
          nb::arg("count"), "Returns pages with one owner; None: there are too few.")
      .def(
          "retain",
          [](PageAllocator& self, nb::handle page) {
            self.retain(integer_from<int64_t>(page, "page"));
          },
          nb::arg("page"))
      .def(
          "release",
          [](PageAllocator& self, nb::handle page) {
            self.release(integer_from<int64_t>(page, "page"));
          },
          nb::arg("page"))
      .def(
          "release_slots",
          [](PageAllocator& self, nb::handle slots) {
            self.release_slots(integers_of<int32_t>(slots, "slots"));
          },
          nb::arg("slots"), "Releases every page that holds one of these consecutive slots.")
      .def(
          "truncate",
          [](PageAllocator& self, nb::handle slots, nb::handle length) {
            self.truncate(integers_of<int32_t>(slots, "slots"),
                          integer_from<int32_t>(length, "length"));
          },
          nb::arg("slots"), nb::arg("length"),
          "Shrinks a request, given by the slots of all its tokens, to its first `length` tokens.")
      .def(
          "references",
          [](const PageAllocator& self, nb::handle page) {
            const int64_t index = integer_from<int64_t>(page, "page");
            check_argument(index >= 0 && index < self.pages(), "page is {}, must be in [0, {})",
                           index, self.pages());
            return self.references(index);
          },
          nb::arg("page"))
      .def_prop_ro("free_pages", &PageAllocator::free_pages)
      .def_prop_ro("pages", &PageAllocator::pages)
      .def_prop_ro("page_size", &PageAllocator::page_size);
}

}  // namespace

void bind_tables(nb::module_& module) {
  bind_request_table(module);
  bind_page_allocator(module);
}

}  // namespace fovea::python
