// SPDX-License-Identifier: Apache-2.0
// Request tables and page allocators.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "c/handles.h"

namespace fovea::c {
namespace {

// Slots or pages that one call of an allocator can take without allocating memory. Longer lists are
// taken in pieces.
constexpr int64_t kPiece = 4096;

PageAllocator& allocator_of(const fovea_page_allocator* allocator) {
  return *need(allocator, "allocator").object;
}

// A scheduler expects this outcome: fmt::format() would allocate memory for its message.
fovea_status too_few_pages(int64_t wanted, int64_t free) {
  char text[96];
  std::snprintf(text, sizeof(text), "%" PRId64 " pages wanted, %" PRId64 " are free", wanted, free);
  return failed(FOVEA_FULL, text);
}

int64_t pages_of(int32_t tokens, int32_t page_size) {
  return (int64_t{tokens} + page_size - 1) / page_size;
}

fovea_status extend(fovea_page_allocator& allocator, int32_t prefix, int32_t length,
                    int64_t last_slot, int64_t* slots) {
  PageAllocator& pages = *allocator.object;
  check(prefix >= 0 && length >= prefix, "length is {}, must be at least the prefix of {}", length,
        prefix);
  entries(slots, static_cast<size_t>(length - prefix), "slots");
  const int64_t wanted = pages_of(length, pages.page_size()) - pages_of(prefix, pages.page_size());
  if (wanted > pages.free_pages()) return too_few_pages(wanted, pages.free_pages());
  for (int32_t done = prefix; done < length;) {
    const auto next = static_cast<int32_t>(std::min<int64_t>(length, done + kPiece));
    allocator.taken.clear();
    if (!pages.extend(done, next, last_slot, allocator.taken)) {
      return too_few_pages(wanted, pages.free_pages());
    }
    slots = std::ranges::copy(allocator.taken, slots).out;
    last_slot = allocator.taken.back();
    done = next;
  }
  return FOVEA_OK;
}

fovea_status allocate(fovea_page_allocator& allocator, int64_t count, int64_t* pages) {
  check(count >= 0, "count is {}, must not be negative", count);
  entries(pages, static_cast<size_t>(count), "pages");
  const int64_t free = allocator.object->free_pages();
  if (count > free) return too_few_pages(count, free);
  for (int64_t done = 0; done < count; done += kPiece) {
    allocator.taken.clear();
    allocator.object->allocate(std::min(kPiece, count - done), allocator.taken);
    pages = std::ranges::copy(allocator.taken, pages).out;
  }
  return FOVEA_OK;
}

}  // namespace
}  // namespace fovea::c

using namespace fovea::c;  // NOLINT: the functions below are those of the C header

fovea_status fovea_request_table_create(int32_t max_requests, int32_t max_context,
                                        fovea_request_table** table) {
  return guarded([&] {
    clear_handle(table, "table");
    auto made = std::make_unique<fovea_request_table>();
    made->object = std::make_unique<fovea::RequestTable>(max_requests, max_context);
    give_handle(std::move(made), table);
  });
}

fovea_status fovea_request_table_destroy(fovea_request_table* table) {
  return destroy_handle(table, "table");
}

fovea_status fovea_request_table_allocate(fovea_request_table* table, int32_t* row) {
  return guarded([&] {
    fovea::RequestTable& rows = *need(table, "table").object;
    set(row, -1, "row");
    const auto taken = rows.allocate();
    if (!taken) return failed(FOVEA_FULL, "no row of the request table is free");
    *row = *taken;
    return fovea_status{FOVEA_OK};
  });
}

fovea_status fovea_request_table_release(fovea_request_table* table, int32_t row) {
  return guarded([&] { need(table, "table").object->release(row); });
}

fovea_status fovea_request_table_row(fovea_request_table* table, int32_t row, int32_t** slots) {
  return guarded([&] { set(slots, need(table, "table").object->row(row).data(), "slots"); });
}

fovea_status fovea_request_table_view(const fovea_request_table* table, fovea_tensor* view) {
  return guarded([&] {
    const fovea::RequestTable& rows = *need(table, "table").object;
    const int64_t shape[] = {rows.max_requests(), rows.max_context()};
    return fovea_tensor_init(view, const_cast<int32_t*>(rows.data()), FOVEA_I32, {FOVEA_CPU, 0},
                             shape, 2);
  });
}

fovea_status fovea_request_table_mark_changed(fovea_request_table* table, int32_t row,
                                              int32_t first) {
  return guarded([&] { need(table, "table").object->mark_changed(row, first); });
}

fovea_status fovea_request_table_take_changed(fovea_request_table* table, int32_t row,
                                              int32_t* first) {
  return guarded([&] {
    fovea::RequestTable& rows = *need(table, "table").object;
    set(first, 0, "first");
    *first = rows.take_changed(row);
  });
}

fovea_status fovea_request_table_available(const fovea_request_table* table, int32_t* rows) {
  return guarded([&] { set(rows, need(table, "table").object->available(), "rows"); });
}

fovea_status fovea_page_allocator_create(int64_t pages, int32_t page_size,
                                         fovea_page_allocator** allocator) {
  return guarded([&] {
    clear_handle(allocator, "allocator");
    auto made = std::make_unique<fovea_page_allocator>();
    made->object = std::make_shared<fovea::PageAllocator>(pages, page_size);
    made->taken.reserve(kPiece);
    give_handle(std::move(made), allocator);
  });
}

fovea_status fovea_page_allocator_destroy(fovea_page_allocator* allocator) {
  return destroy_handle(allocator, "allocator");
}

fovea_status fovea_page_allocator_extend(fovea_page_allocator* allocator, int32_t prefix,
                                         int32_t length, int64_t last_slot, int64_t* slots) {
  return guarded(
      [&] { return extend(need(allocator, "allocator"), prefix, length, last_slot, slots); });
}

fovea_status fovea_page_allocator_allocate(fovea_page_allocator* allocator, int64_t count,
                                           int64_t* pages) {
  return guarded([&] { return allocate(need(allocator, "allocator"), count, pages); });
}

fovea_status fovea_page_allocator_retain(fovea_page_allocator* allocator, int64_t page) {
  return guarded([&] { allocator_of(allocator).retain(page); });
}

fovea_status fovea_page_allocator_release(fovea_page_allocator* allocator, int64_t page) {
  return guarded([&] { allocator_of(allocator).release(page); });
}

fovea_status fovea_page_allocator_release_slots(fovea_page_allocator* allocator,
                                                const int32_t* slots, size_t count) {
  return guarded([&] { allocator_of(allocator).release_slots(entries(slots, count, "slots")); });
}

fovea_status fovea_page_allocator_truncate(fovea_page_allocator* allocator, const int32_t* slots,
                                           size_t count, int32_t length) {
  return guarded([&] { allocator_of(allocator).truncate(entries(slots, count, "slots"), length); });
}

fovea_status fovea_page_allocator_references(const fovea_page_allocator* allocator, int64_t page,
                                             int32_t* owners) {
  return guarded([&] { set(owners, allocator_of(allocator).references(page), "owners"); });
}

fovea_status fovea_page_allocator_free_pages(const fovea_page_allocator* allocator,
                                             int64_t* pages) {
  return guarded([&] { set(pages, allocator_of(allocator).free_pages(), "pages"); });
}
