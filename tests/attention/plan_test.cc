// SPDX-License-Identifier: Apache-2.0
// Errors of plan(): every symptom has its message, and no wild index is followed.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "attention/symptoms.h"

namespace fovea {
namespace {

using test::expect_invalid;
using test::expect_symptoms;
using test::kContext;
using test::kPage;
using test::kPages;
using Fixture = test::TwoRequests;

TEST(Plan, RefusesLengthsThatAreWrong) {
  expect_symptoms({
      {"requests is 3, must be in [0, 2]", [](auto& f) { f.batch.requests = 3; }},
      {"requests is -1", [](auto& f) { f.batch.requests = -1; }},
      {"tokens is 6, must be in [0, 5]", [](auto& f) { f.batch.tokens = 6; }},
      {"q_indptr is absent", [](auto& f) { f.batch.q_indptr = {}; }},
      {"q_indptr[0] is 1", [](auto& f) { f.q_indptr[0] = 1; }},
      {"not monotone",
       [](auto& f) {
         f.q_indptr = {0, 3, 2};
       }},
      {"must be tokens = 5", [](auto& f) { f.q_indptr[2] = 4; }},
      {"request 1: q_len is 4, at most 3", [](auto& f) { f.q_indptr[1] = 1; }},
      {"mode is ForwardMode(99)", [](auto& f) { f.batch.mode = static_cast<ForwardMode>(99); }},
      {"request 1: q_len is 3, mode target_verify",
       [](auto& f) { f.batch.mode = ForwardMode::target_verify; }},
      {"kv_lens is absent", [](auto& f) { f.batch.kv_lens = {}; }},
      {"request 0: kv_len is 17, must be in [0, 16]", [](auto& f) { f.kv_lens[0] = 17; }},
      {"request 1: kv_len is -1, must be in", [](auto& f) { f.kv_lens[1] = -1; }},
      {"hints.max_q_len is 4, must be in [0, 3]", [](auto& f) { f.batch.hints.max_q_len = 4; }},
      {"hints.max_kv_len is 17, must be in [0, 16]",
       [](auto& f) { f.batch.hints.max_kv_len = 17; }},
      {"tokens is 5, a batch without requests has 0", [](auto& f) { f.batch.requests = 0; }},
      {"hints.max_q_len is 3, mode decode takes 1",
       [](auto& f) { f.batch.mode = ForwardMode::decode; }},
      {"tokens is 5, mode decode takes 1 for each of 2 requests",
       [](auto& f) {
         f.batch.mode = ForwardMode::decode;
         f.batch.hints.max_q_len = 1;
       }},
      {"request 1: q_len is 2, mode decode takes 1",
       [](auto& f) {
         f.batch.mode = ForwardMode::decode;
         f.batch.hints.max_q_len = 1;
         f.batch.tokens = 2;
         f.q_indptr = {0, 0, 2};
       }},
      {"request 1: kv_len is 2, less than its 3 new tokens", [](auto& f) { f.kv_lens[1] = 2; }},
      {"request 1: q_len is 3, above the batch's max_q_len of 2",
       [](auto& f) { f.batch.hints.max_q_len = 2; }},
      {"request 0: kv_len is 9, above the batch's max_kv_len of 8",
       [](auto& f) { f.batch.hints.max_kv_len = 8; }},
      {"hints.host_q_lens are given, hints.host_kv_lens are absent: give both or neither",
       [](auto& f) { f.batch.hints.host_q_lens = f.kv_lens; }},
      {"hints.host_q_lens[0] is 4, must be in [0, 3]", [](auto& f) { f.tell(4, 3, 9, 6); }},
      {"hints.host_kv_lens[1] is -1, must be in [0, 9]", [](auto& f) { f.tell(2, 3, 9, -1); }},
      {"request 1: q_len is 3, above its hints.host_q_lens of 2",
       [](auto& f) { f.tell(2, 2, 9, 6); }},
      {"request 0: kv_len is 9, above its hints.host_kv_lens of 8",
       [](auto& f) { f.tell(2, 3, 8, 6); }},
      {"hints.max_kv_len is 9, a row of table has 8 tokens",
       [](auto& f) { f.batch.table.stride = 8; }},
      {"request 0: kv_len is 9, its row of table has 8",
       [](auto& f) {
         f.batch.hints.max_kv_len = 8;
         f.batch.table.stride = 8;
       }},
      {"request 0: kv_len is 9, its row of table has 8",
       [](auto& f) {
         f.give_pages();
         f.batch.hints.max_kv_len = 8;
         f.batch.table.stride = 2;
       }},
  });
}

TEST(Plan, RefusesArraysThatAreTooShort) {
  const auto cut = [](auto& array) { array = array.first(array.size() - 1); };
  expect_symptoms({
      {"q_indptr has 2 elements, the batch needs 3", [&](auto& f) { cut(f.batch.q_indptr); }},
      {"kv_lens has 1 elements, the batch needs 2", [&](auto& f) { cut(f.batch.kv_lens); }},
      {"request_rows has 1 elements, the batch needs 2",
       [&](auto& f) { cut(f.batch.request_rows); }},
      {"out_slots has 4 elements, the batch needs 5", [&](auto& f) { cut(f.batch.out_slots); }},
      {"positions has 4 elements, the batch needs 5", [&](auto& f) { cut(f.batch.positions); }},
      {"cross.lens has 1 elements, the batch needs 2", [&](auto& f) { cut(f.batch.cross.lens); }},
      {"masks.tree.ancestors has 4 elements, the batch needs 5",
       [&](auto& f) { cut(f.batch.masks.tree.ancestors); }},
      {"hints.host_q_lens has 1 elements, the batch needs 2",
       [&](auto& f) {
         f.tell(2, 3, 9, 6);
         cut(f.batch.hints.host_q_lens);
       }},
  });
  expect_symptoms({{"masks.custom.visible has 35 bytes, masks.custom.indptr ends at 36",
                    [&](auto& f) { cut(f.batch.masks.custom.visible); }}},
                  [](Fixture& f) { f.spec.mask = MaskKind::custom; });
  expect_symptoms({{"masks.items.token_pos has 9 elements, the batch needs 10",
                    [&](auto& f) { cut(f.batch.masks.items.token_pos); }}},
                  [](Fixture& f) { f.spec.mask = MaskKind::multi_item; });
}

TEST(Plan, RefusesMasksThatDoNotFit) {
  expect_symptoms(
      {{"masks.custom.visible is absent", [](auto& f) { f.batch.masks.custom.visible = {}; }},
       {"masks.custom.indptr is absent", [](auto& f) { f.batch.masks.custom.indptr = {}; }},
       {"request 0: its custom mask has 17 bytes, q_len * kv_len = 2 * 9 needs 18",
        [](auto& f) { f.custom_indptr[1] = 17; }},
       {"masks.custom.indptr[0] is -1", [](auto& f) { f.custom_indptr[0] = -1; }},
       {"masks.custom.indptr[1] is -9223372036854775792",
        [](auto& f) {
          f.custom_indptr[0] = std::numeric_limits<int64_t>::max() - 1;
          f.custom_indptr[1] = std::numeric_limits<int64_t>::min() + 16;
        }}},
      [](Fixture& f) { f.spec.mask = MaskKind::custom; });
  expect_symptoms(
      {{"masks.spans.indptr is absent", [](auto& f) { f.batch.masks.spans.indptr = {}; }},
       {"masks.spans.bounds has 0 elements, the spans of request 0 end at 2",
        [](auto& f) { f.batch.masks.spans.bounds = {}; }},
       {"masks.spans.indptr[2] is 0", [](auto& f) { f.span_indptr[2] = 0; }},
       {"masks.spans.indptr[0] is -1", [](auto& f) { f.span_indptr[0] = -1; }},
       {"span [-1, 3) is not a range", [](auto& f) { f.spans[0] = -1; }},
       {"span [3, 0) is not a range",
        [](auto& f) {
          f.spans = {3, 0};
          f.batch.masks.spans.bounds = f.spans;
        }}},
      [](Fixture& f) { f.spec.mask = MaskKind::prefix_spans; });
  expect_symptoms(
      {{"masks.items.prefix_lens is absent", [](auto& f) { f.batch.masks.items.prefix_lens = {}; }},
       {"masks.items.token_pos is absent", [](auto& f) { f.batch.masks.items.token_pos = {}; }},
       {"request 0: 6 tokens after its prefix of 3", [](auto& f) { f.prefix_lens[0] = 3; }}},
      [](Fixture& f) { f.spec.mask = MaskKind::multi_item; });
  expect_symptoms({{"masks.tree.ancestors is absent",
                    [](auto& f) {
                      f.q_indptr = {0, 2, 4};
                      f.batch.q_indptr = f.q_indptr;
                      f.batch.tokens = 4;
                      f.batch.mode = ForwardMode::target_verify;
                      f.batch.masks.tree.ancestors = {};
                    }},
                   {"request 0: 65 new tokens, a tree mask covers 64",
                    [](auto& f) {
                      f.q_indptr = {0, 65};
                      f.kv_lens = {65};
                      f.tree.resize(65);
                      f.batch.requests = 1;
                      f.batch.tokens = 65;
                      f.batch.hints.max_q_len = f.batch.hints.max_kv_len = 65;
                      f.batch.q_indptr = f.q_indptr;
                      f.batch.kv_lens = f.kv_lens;
                      f.batch.masks.tree.ancestors = f.tree;
                      f.batch.out_slots = {};
                      f.batch.positions = {};
                      f.batch.table.stride = 96;
                    }}},
                  [](Fixture& f) {
                    f.spec.mask = MaskKind::tree;
                    f.limits.max_tokens = f.limits.max_q_len = f.limits.max_kv_len = 70;
                  });
}

TEST(Plan, RefusesEncodersThatDoNotFit) {
  expect_symptoms(
      {{"cross.lens is absent", [](auto& f) { f.batch.cross.lens = {}; }},
       {"cross.table is absent", [](auto& f) { f.batch.cross.table.entries = nullptr; }},
       {"cross.table.entry_tokens is 3, must be 1 (slots) or 4 (pages of the pool)",
        [](auto& f) { f.batch.cross.table.entry_tokens = 3; }},
       {"cross.table.stride is 0", [](auto& f) { f.batch.cross.table.stride = 0; }},
       {"request 0: cross.lens is 8, its row of cross.table has 4",
        [](auto& f) {
          f.batch.cross.table.entries = f.pages.data();
          f.batch.cross.table.entry_tokens = kPage;
          f.batch.cross.table.stride = 1;
        }},
       {"request 0: cross.lens is 9, must be in [0, 8]", [](auto& f) { f.encoder_lens[0] = 9; }},
       {"request 1: cross.lens is -1", [](auto& f) { f.encoder_lens[1] = -1; }}},
      [](Fixture& f) { f.spec.scope = AttentionScope::cross; });
}

// Lengths, slots and positions at the limits of their ranges.
TEST(Plan, TakesWhatIsJustInside) {
  Fixture fixture;
  fixture.kv_lens = {16, 3};
  fixture.batch.hints.max_kv_len = 16;
  std::vector<int32_t> narrow;  // rows of just 16 tokens
  for (int32_t row = 0; row < 3; ++row) {
    const auto begin = fixture.slots.begin() + row * kContext;
    narrow.insert(narrow.end(), begin, begin + 16);
  }
  fixture.batch.table.entries = narrow.data();
  fixture.batch.table.stride = 16;
  fixture.out_slots = {kPages * kPage - 1, -1, kPage, kPage + 1, kPage + 2};
  fixture.positions = {15, 0, 2, 2, 2};
  fixture.create();
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
  fixture.kv_lens = {16, 0};  // padding: its positions are ignored
  fixture.rows[1] = 0;
  fixture.out_slots = {kPages * kPage - 1, -1, 0, kPage - 1, 0};
  fixture.positions[3] = -7;
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
  fixture.batch.mode = ForwardMode::idle;
  fixture.batch.requests = -1;
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
}

TEST(Plan, CrossAttentionDoesNotLookAtTheDecodersLengths) {
  Fixture fixture;
  fixture.spec.scope = AttentionScope::cross;
  fixture.kv_lens = {99, -1};
  fixture.create();
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
  fixture.batch.kv_lens = {};
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
}

// Check 6 for every array: with any value of one entry, the plan is refused or the pass stays
// inside its memory (in sanitizer builds).
TEST(Plan, OneWildEntryIsAnErrorOrHarmless) {
  int refused = 0;
  RC_ASSERT(rc::check([&refused] {
    Fixture fixture;
    fixture.spec.mask = *rc::gen::element(MaskKind::none, MaskKind::tree, MaskKind::custom,
                                          MaskKind::prefix_spans, MaskKind::multi_item);
    fixture.spec.window = *rc::gen::element(0, 1, 4);
    fixture.create();
    const auto wild = *rc::gen::element<int32_t>(-1, -2, 0, 1, 2, 7, 48, 64, 1 << 20,
                                                 std::numeric_limits<int32_t>::min(),
                                                 std::numeric_limits<int32_t>::max());
    const auto damage = [&](auto& array) {
      using Entry = typename std::decay_t<decltype(array)>::value_type;
      array[*rc::gen::inRange<size_t>(0, array.size())] = static_cast<Entry>(wild);
    };
    switch (*rc::gen::inRange(0, 10)) {
      case 0:
        damage(fixture.q_indptr);
        break;
      case 1:
        damage(fixture.kv_lens);
        break;
      case 2:
        damage(fixture.slots);
        break;
      case 3:
        damage(fixture.out_slots);
        break;
      case 4:
        damage(fixture.positions);
        break;
      case 5:
        damage(fixture.custom_indptr);
        break;
      case 6:
        damage(fixture.spans);
        break;
      case 7:
        damage(fixture.prefix_lens);
        break;
      case 8:
        fixture.give_pages();
        damage(fixture.pages);
        break;
      default:
        damage(fixture.in_items);
    }
    std::vector<float> rows(5 * 2 * 8);
    const HeadRows q = dense_rows(rows.data(), DType::f32, 2, 8);
    const HeadRows k = dense_rows(rows.data(), DType::f32, 1, 8);
    try {
      fixture.backend->plan(fixture.batch);
    } catch (const Error&) {
      ++refused;
      return;
    }
    fixture.backend->forward({.q = q, .k = k, .v = k, .out = q});
  }));
  EXPECT_GT(refused, 0);
}

TEST(Plan, PagesBeforeTheWindowMayBeGone) {
  Fixture fixture;
  fixture.spec.window = 2;
  fixture.create();
  // Token 7 of request 0 sees 6 and 7: pages 1 and 2. The first page may belong to another request
  // by now.
  for (int32_t token = 0; token < kPage; ++token) fixture.slots[kContext + token] = -1;
  fixture.backend->plan(fixture.batch);
  fixture.slots[kContext + 6] = -1;
  expect_invalid("request 0, column 1", [&] { fixture.backend->plan(fixture.batch); });
}

// An array without entries may have no address, like data() of an empty vector.
TEST(Plan, WithoutNewTokensNoMaskIsNeeded) {
  for (const MaskKind mask : {MaskKind::tree, MaskKind::custom, MaskKind::prefix_spans}) {
    Fixture fixture;
    fixture.spec.mask = mask;
    fixture.create();
    fixture.q_indptr = {0, 0, 0};
    fixture.batch.mode = ForwardMode::target_verify;
    fixture.batch.tokens = fixture.batch.hints.max_q_len = 0;
    fixture.batch.masks.tree.ancestors = {};
    fixture.batch.masks.custom.visible = {};
    fixture.batch.masks.custom.indptr = {};
    fixture.batch.masks.spans.indptr = {};
    fixture.batch.out_slots = {};
    fixture.batch.positions = {};
    EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
    EXPECT_NO_THROW(fixture.backend->forward({}));
  }
}

}  // namespace
}  // namespace fovea
