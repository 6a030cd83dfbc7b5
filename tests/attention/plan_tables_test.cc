// SPDX-License-Identifier: Apache-2.0
// Errors of plan() about tables, rows, slots and addresses of arrays.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "attention/symptoms.h"
#include "attention/validate/batch.h"

namespace fovea {
namespace {

using test::error_of;
using test::expect_symptoms;
using test::kContext;
using test::kPage;
using test::kPages;
using Fixture = test::TwoRequests;
using test::Symptom;

constexpr int32_t kHuge = std::numeric_limits<int32_t>::max();

TEST(Plan, RefusesSlotsOutsideThePool) {
  expect_symptoms({
      {"table is absent", [](auto& f) { f.batch.table.entries = nullptr; }},
      {"table.stride is 0", [](auto& f) { f.batch.table.stride = 0; }},
      {"table.stride is -1",
       [](auto& f) {
         f.give_pages();
         f.batch.table.stride = -1;
       }},
      {"table.entry_tokens is 0", [](auto& f) { f.batch.table.entry_tokens = 0; }},
      {"table.entry_tokens is 2, must be 1 (slots) or 4 (pages of the pool)",
       [](auto& f) { f.batch.table.entry_tokens = 2; }},
      {"request 1, column 0: page 12 is outside [0, 12)",
       [](auto& f) {
         f.give_pages();
         f.pages[2 * kContext] = kPages;
       }},
      {"request_rows is absent", [](auto& f) { f.batch.request_rows = {}; }},
      {"request_rows[1] is -2, must be in [0, 3)", [](auto& f) { f.rows[1] = -2; }},
      {"request_rows[1] is 3, must be in [0, 3)", [](auto& f) { f.rows[1] = 3; }},
      {"request_rows[0] is 2147483647", [](auto& f) { f.rows[0] = kHuge; }},
      {"table.rows is 0, must be positive", [](auto& f) { f.batch.table.rows = 0; }},
      {"table.rows is -1, must be positive", [](auto& f) { f.batch.table.rows = -1; }},
      {"request 0, column 2", [](auto& f) { f.slots[kContext + 8] = kPages * kPage; }},
      {"outside the pool of 12 pages", [](auto& f) { f.slots[kContext + 8] = kPages * kPage; }},
      {"request 1, column 0", [](auto& f) { f.slots[2 * kContext + 3] = -1; }},
      {"request 0, column 1",
       [](auto& f) { f.slots[kContext + 7] = std::numeric_limits<int32_t>::min(); }},
      {"exceeds the pages it owns", [](auto& f) { f.slots[kContext + 8] = 0; }},
      {"out_slots[3] is 48, must be in [-1, 48)", [](auto& f) { f.out_slots[3] = 48; }},
      {"out_slots[0] is -2", [](auto& f) { f.out_slots[0] = -2; }},
      {"out_slots[3] is 31, which is out_slots[1]",
       [](auto& f) { f.out_slots[1] = f.out_slots[3] = 31; }},
      {"out_slots[4] is 23, which is out_slots[2]",
       [](auto& f) { f.out_slots[4] = f.out_slots[2] = 23; }},
      {"positions[4] is 6, must be in [0, 6)", [](auto& f) { f.positions[4] = 6; }},
      {"positions[0] is -1", [](auto& f) { f.positions[0] = -1; }},
  });
}

// A block table that was only zeroed, or partly filled, names page 0.
TEST(Plan, RefusesPageZeroOfRequestsThatAreNoPadding) {
  const std::vector<Symptom> symptoms = {
      {"request 0, column 1: token 7 has no page (slot 3 is padding's)",
       [](auto& f) {
         f.give_pages();
         f.pages[kContext + 1] = 0;
       }},
      {"request 1, column 0", [](auto& f) { std::fill_n(&f.slots[2 * kContext], 6, 0); }},
      {"request 1, column 1: token 5 has no page",
       [](auto& f) { f.slots[2 * kContext + 4] = 0, f.slots[2 * kContext + 5] = 1; }},
      {"out_slots[0] is 11, outside page 0 of 4 slots: its request is padding",
       [](auto& f) { f.rows[0] = 0; }},
      {"out_slots[1] is 3, in page 0 of 4 slots: its request is not padding",
       [](auto& f) { f.out_slots[1] = 3; }},
      {"out_slots[2] is 23, outside page 0", [](auto& f) { f.kv_lens[1] = 0; }},
      {"request 0, column 1: the entry of token 7 is 5, but that of its last token is 0, which "
       "makes the request padding",
       [](auto& f) {
         f.give_pages();
         f.rows[0] = 0;
         f.pages[1] = 5;
         f.out_slots[0] = f.out_slots[1] = -1;
       }},
  };
  expect_symptoms(symptoms);
  Fixture padded;  // row 0 lists page 0 at any length, and page 0 takes any number of writes
  padded.rows[0] = 0;
  padded.out_slots[0] = padded.out_slots[1] = 0;
  padded.create();
  EXPECT_NO_THROW(padded.backend->plan(padded.batch));
  padded.give_pages();
  EXPECT_NO_THROW(padded.backend->plan(padded.batch));
}

constexpr int64_t kFar = std::numeric_limits<int64_t>::max();

TEST(Plan, RefusesStridesBeyondAddresses) {
  expect_symptoms({
      {"table at", [](auto& f) { f.batch.table.stride = kFar; }},
      {"addresses exceed 63 bits", [](auto& f) { f.batch.table.stride = kFar / 4; }},
      {"table at",
       [](auto& f) {
         f.give_pages();
         f.batch.table.stride = kFar;
       }},
      {"table at",
       [](auto& f) {
         f.give_pages();
         f.batch.table.rows = kHuge;
         f.batch.table.stride = int64_t{1} << 33;
       }},
  });
  expect_symptoms(
      {{"masks.items.stride is -1", [](auto& f) { f.batch.masks.items.stride = -1; }},
       {"masks.items.token_pos at", [](auto& f) { f.batch.masks.items.stride = kFar; }}},
      [](Fixture& f) { f.spec.mask = MaskKind::multi_item; });
  expect_symptoms({{"cross.table at", [](auto& f) { f.batch.cross.table.stride = kFar; }}},
                  [](Fixture& f) { f.spec.scope = AttentionScope::cross; });
}

template <typename T>
const T* one_byte_on(const T* array) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(array) + 1);
}
template <typename T>
std::span<const T> one_byte_on(std::span<const T> array) {
  return {one_byte_on(array.data()), array.size()};
}

TEST(Plan, RefusesMisalignedArrays) {
  expect_symptoms({
      {"q_indptr is at", [](auto& f) { f.batch.q_indptr = one_byte_on(f.batch.q_indptr); }},
      {"kv_lens is at", [](auto& f) { f.batch.kv_lens = one_byte_on(f.batch.kv_lens); }},
      {"request_rows is at",
       [](auto& f) { f.batch.request_rows = one_byte_on(f.batch.request_rows); }},
      {"table is at", [](auto& f) { f.batch.table.entries = one_byte_on(f.batch.table.entries); }},
      {"must be aligned to 8 bytes",
       [](auto& f) { f.batch.out_slots = one_byte_on(f.batch.out_slots); }},
      {"positions is at", [](auto& f) { f.batch.positions = one_byte_on(f.batch.positions); }},
  });
}

TEST(Plan, WithoutReadingArraysATableIsMissed) {
  const Fixture fixture;
  const auto* device = reinterpret_cast<const int32_t*>(64);
  BatchView good = fixture.batch;
  good.q_indptr = {device, 3};
  good.kv_lens = good.request_rows = good.cross.lens = {device, 2};
  good.table =
      good.cross.table = {.entries = device, .stride = 4, .entry_tokens = kPage, .rows = 3};
  for (const bool cross : {false, true}) {
    BatchRules rules{.spec = fixture.spec, .limits = fixture.limits, .page_size = kPage};
    if (cross) rules.spec.scope = AttentionScope::cross;
    const std::string name = cross ? "cross.table" : "table";
    EXPECT_NO_THROW(validate_batch_shape(good, rules));
    const auto expect = [&](const std::string& words, void (*cause)(TokenTable&)) {
      BatchView batch = good;
      cause(cross ? batch.cross.table : batch.table);
      EXPECT_EQ(error_of([&] { validate_batch_shape(batch, rules); }), name + words);
    };
    expect(" is absent, the batch needs it", [](TokenTable& table) { table.entries = nullptr; });
    expect(".stride is 0, must be positive", [](TokenTable& table) { table.stride = 0; });
    expect(".entry_tokens is 2, must be 1 (slots) or 4 (pages of the pool)",
           [](TokenTable& table) { table.entry_tokens = 2; });
  }
}

TEST(Plan, WithoutReadingLengthsTheirBoundMustFitTheTable) {
  const Fixture fixture;
  const BatchRules rules{.spec = fixture.spec, .limits = fixture.limits, .page_size = kPage};
  BatchView batch = fixture.batch;
  const auto validate = [&] { validate_batch_shape(batch, rules); };
  batch.table.stride = 8;
  EXPECT_EQ(error_of(validate), "hints.max_kv_len is 9, a row of table has 8 tokens");
  batch.table.entries = fixture.pages.data();
  batch.table.entry_tokens = kPage;
  batch.table.stride = 2;
  EXPECT_EQ(error_of(validate), "hints.max_kv_len is 9, a row of table has 8 tokens");
  batch.hints.max_kv_len = 8;
  EXPECT_NO_THROW(validate());
  batch.hints.max_kv_len = 0;
  batch.table.stride = 3;
  EXPECT_EQ(error_of(validate),
            "hints.max_kv_len is 16 (that of the limits), a row of table has 12 tokens");
  batch.table.stride = 4;
  EXPECT_NO_THROW(validate());
}

}  // namespace
}  // namespace fovea
