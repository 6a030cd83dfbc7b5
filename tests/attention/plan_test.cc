// SPDX-License-Identifier: Apache-2.0
// What plan() refuses: every symptom has its message, and nothing wild is followed.
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
      {"q_indptr is null", [](auto& f) { f.batch.q_indptr = nullptr; }},
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
      {"kv_lens is null", [](auto& f) { f.batch.kv_lens = nullptr; }},
      {"request 0: kv_len is 17, must be in [0, 16]", [](auto& f) { f.kv_lens[0] = 17; }},
      {"request 1: kv_len is -1, must be in", [](auto& f) { f.kv_lens[1] = -1; }},
      {"max_q_len is 4, must be in [0, 3]", [](auto& f) { f.batch.max_q_len = 4; }},
      {"max_kv_len is 17, must be in [0, 16]", [](auto& f) { f.batch.max_kv_len = 17; }},
      {"tokens is 5, a batch without requests has 0", [](auto& f) { f.batch.requests = 0; }},
      {"max_q_len is 3, mode decode takes 1", [](auto& f) { f.batch.mode = ForwardMode::decode; }},
      {"tokens is 5, mode decode takes 1 for each of 2 requests",
       [](auto& f) {
         f.batch.mode = ForwardMode::decode;
         f.batch.max_q_len = 1;
       }},
      {"request 1: q_len is 2, mode decode takes 1",
       [](auto& f) {
         f.batch.mode = ForwardMode::decode;
         f.batch.max_q_len = 1;
         f.batch.tokens = 2;
         f.q_indptr = {0, 0, 2};
       }},
      {"request 1: kv_len is 2, less than its 3 new tokens", [](auto& f) { f.kv_lens[1] = 2; }},
      {"request 1: q_len is 3, above the batch's max_q_len of 2",
       [](auto& f) { f.batch.max_q_len = 2; }},
      {"request 0: kv_len is 9, above the batch's max_kv_len of 8",
       [](auto& f) { f.batch.max_kv_len = 8; }},
      {"host_q_lens are given, host_kv_lens are null: give both or neither",
       [](auto& f) { f.batch.host_q_lens = f.kv_lens.data(); }},
      {"host_q_lens[0] is 4, must be in [0, 3]", [](auto& f) { f.tell(4, 3, 9, 6); }},
      {"host_kv_lens[1] is -1, must be in [0, 9]", [](auto& f) { f.tell(2, 3, 9, -1); }},
      {"request 1: q_len is 3, above its host_q_lens of 2", [](auto& f) { f.tell(2, 2, 9, 6); }},
      {"request 0: kv_len is 9, above its host_kv_lens of 8", [](auto& f) { f.tell(2, 3, 8, 6); }},
      {"max_kv_len is 9, a row of request_slots has 8 tokens",
       [](auto& f) { f.batch.request_slots_stride = 8; }},
      {"request 0: kv_len is 9, its row of request_slots has 8",
       [](auto& f) {
         f.batch.max_kv_len = 8;
         f.batch.request_slots_stride = 8;
       }},
      {"request 0: kv_len is 9, its row of page_table has 8",
       [](auto& f) {
         f.give_pages();
         f.batch.max_kv_len = 8;
         f.batch.page_table_stride = 2;
       }},
  });
}

TEST(Plan, RefusesMasksThatDoNotFit) {
  expect_symptoms(
      {{"custom_mask is null", [](auto& f) { f.batch.custom_mask = nullptr; }},
       {"custom_mask_indptr is null", [](auto& f) { f.batch.custom_mask_indptr = nullptr; }},
       {"request 0: its custom mask has 17 bytes, q_len * kv_len = 2 * 9 needs 18",
        [](auto& f) { f.custom_indptr[1] = 17; }},
       {"custom_mask_indptr[0] is -1", [](auto& f) { f.custom_indptr[0] = -1; }},
       {"custom_mask_indptr[1] is -9223372036854775792",
        [](auto& f) {
          f.custom_indptr[0] = std::numeric_limits<int64_t>::max() - 1;
          f.custom_indptr[1] = std::numeric_limits<int64_t>::min() + 16;
        }}},
      [](Fixture& f) { f.spec.mask = MaskKind::custom; });
  expect_symptoms({{"span_indptr is null", [](auto& f) { f.batch.span_indptr = nullptr; }},
                   {"spans is null", [](auto& f) { f.batch.spans = nullptr; }},
                   {"span_indptr[2] is 0", [](auto& f) { f.span_indptr[2] = 0; }},
                   {"span_indptr[0] is -1", [](auto& f) { f.span_indptr[0] = -1; }},
                   {"span [-1, 3) is not a range", [](auto& f) { f.spans[0] = -1; }},
                   {"span [3, 0) is not a range",
                    [](auto& f) {
                      f.spans = {3, 0};
                      f.batch.spans = f.spans.data();
                    }}},
                  [](Fixture& f) { f.spec.mask = MaskKind::prefix_spans; });
  expect_symptoms(
      {{"item_prefix_lens is null", [](auto& f) { f.batch.item_prefix_lens = nullptr; }},
       {"token_pos_in_items is null", [](auto& f) { f.batch.token_pos_in_items = nullptr; }},
       {"request 0: 6 tokens after its prefix of 3", [](auto& f) { f.prefix_lens[0] = 3; }}},
      [](Fixture& f) { f.spec.mask = MaskKind::multi_item; });
  expect_symptoms({{"tree_mask is null",
                    [](auto& f) {
                      f.q_indptr = {0, 2, 4};
                      f.batch.q_indptr = f.q_indptr.data();
                      f.batch.tokens = 4;
                      f.batch.mode = ForwardMode::target_verify;
                      f.batch.tree_mask = nullptr;
                    }},
                   {"request 0: 65 new tokens, a tree mask covers 64",
                    [](auto& f) {
                      f.q_indptr = {0, 65};
                      f.kv_lens = {65};
                      f.batch.requests = 1;
                      f.batch.tokens = 65;
                      f.batch.max_q_len = f.batch.max_kv_len = 65;
                      f.batch.q_indptr = f.q_indptr.data();
                      f.batch.kv_lens = f.kv_lens.data();
                      f.batch.out_slots = nullptr;
                      f.batch.positions = nullptr;
                      f.batch.request_slots_stride = 96;
                    }}},
                  [](Fixture& f) {
                    f.spec.mask = MaskKind::tree;
                    f.limits.max_tokens = f.limits.max_q_len = f.limits.max_kv_len = 70;
                  });
}

TEST(Plan, RefusesEncodersThatDoNotFit) {
  expect_symptoms(
      {{"encoder_lens is null", [](auto& f) { f.batch.encoder_lens = nullptr; }},
       {"encoder_slots and encoder_page_table are null",
        [](auto& f) { f.batch.encoder_slots = nullptr; }},
       {"encoder_slots and encoder_page_table are given",
        [](auto& f) { f.batch.encoder_page_table = f.pages.data(); }},
       {"encoder_slots_stride is 0", [](auto& f) { f.batch.encoder_slots_stride = 0; }},
       {"request 0: encoder_lens is 8, its row of encoder_page_table has 4",
        [](auto& f) {
          f.batch.encoder_slots = nullptr;
          f.batch.encoder_page_table = f.pages.data();
          f.batch.encoder_page_table_stride = 1;
        }},
       {"request 0: encoder_lens is 9, must be in [0, 8]", [](auto& f) { f.encoder_lens[0] = 9; }},
       {"request 1: encoder_lens is -1", [](auto& f) { f.encoder_lens[1] = -1; }}},
      [](Fixture& f) { f.spec.scope = AttentionScope::cross; });
}

// Lengths, slots and positions at the edge of what they may be.
TEST(Plan, TakesWhatIsJustInside) {
  Fixture fixture;
  fixture.kv_lens = {16, 3};
  fixture.batch.max_kv_len = 16;
  std::vector<int32_t> narrow;  // rows of just 16 tokens
  for (int32_t row = 0; row < 3; ++row) {
    const auto begin = fixture.slots.begin() + row * kContext;
    narrow.insert(narrow.end(), begin, begin + 16);
  }
  fixture.batch.request_slots = narrow.data();
  fixture.batch.request_slots_stride = 16;
  fixture.out_slots = {kPages * kPage - 1, -1, kPage, kPage + 1, kPage + 2};
  fixture.positions = {15, 0, 2, 2, 2};
  fixture.create();
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
  fixture.kv_lens = {16, 0};  // padding: its positions mean nothing
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
  fixture.batch.kv_lens = nullptr;
  EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
}

// Check 6 for every array at once: whatever one entry becomes, the plan is refused or the pass runs
// inside its memory (the sanitizer build watches).
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
  // Token 7 of request 0 sees 6 and 7: pages 1 and 2. Page 0 is somebody else's by now.
  for (int32_t token = 0; token < kPage; ++token) fixture.slots[kContext + token] = -1;
  fixture.backend->plan(fixture.batch);
  fixture.slots[kContext + 6] = -1;
  expect_invalid("request 0, column 1", [&] { fixture.backend->plan(fixture.batch); });
}

// What backends of a GPU check: the arrays, here at an address that nobody may read, count only as
// given or not.
// What has no entries may have no address: data() of an empty vector.
TEST(Plan, WithoutNewTokensNoMaskIsNeeded) {
  for (const MaskKind mask : {MaskKind::tree, MaskKind::custom, MaskKind::prefix_spans}) {
    Fixture fixture;
    fixture.spec.mask = mask;
    fixture.create();
    fixture.q_indptr = {0, 0, 0};
    fixture.batch.mode = ForwardMode::target_verify;
    fixture.batch.tokens = fixture.batch.max_q_len = 0;
    fixture.batch.tree_mask = nullptr;
    fixture.batch.custom_mask = nullptr;
    fixture.batch.custom_mask_indptr = nullptr;
    fixture.batch.span_indptr = nullptr;
    fixture.batch.out_slots = nullptr;
    fixture.batch.positions = nullptr;
    EXPECT_NO_THROW(fixture.backend->plan(fixture.batch));
    EXPECT_NO_THROW(fixture.backend->forward({}));
  }
}

}  // namespace
}  // namespace fovea
