// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "c/misuse.h"

namespace fovea::test {
namespace {

// Plans a batch with one tensor changed.
Misuse plan_with(const std::string& name, WorldArray SmallWorld::*array,
                 const std::function<void(DLTensor&)>& change, const std::string& message) {
  return {name,
          [=](SmallWorld& world) {
            change((world.*array).tensor.view);
            return world.plan();
          },
          message};
}

// Plans, then runs a layer with one tensor changed.
Misuse forward_with(const std::string& name, WorldArray SmallWorld::*array,
                    const std::function<void(DLTensor&)>& change, const std::string& message) {
  return {name,
          [=](SmallWorld& world) {
            EXPECT_EQ(world.plan(), FOVEA_OK) << fovea_last_error();
            change((world.*array).tensor.view);
            return world.forward();
          },
          message};
}

constexpr int64_t kHuge = int64_t{1} << 60;

}  // namespace

std::vector<Misuse> misused_arrays() {
  using W = SmallWorld;
  return {
      plan_with(
          "device", &W::q_indptr, [](DLTensor& t) { t.device.device_type = kDLCUDA; },
          "q_indptr is on device_type 2, device_id 0, must be on cpu"),
      plan_with(
          "dtype", &W::q_indptr, [](DLTensor& t) { t.dtype.bits = 64; },
          "q_indptr: dtype is (code 0, 64 bits), must be int32"),
      plan_with(
          "lanes", &W::kv_lens, [](DLTensor& t) { t.dtype.lanes = 2; },
          "kv_lens: dtype.lanes is 2"),
      plan_with(
          "dimensions", &W::rows, [](DLTensor& t) { t.ndim = 2; },
          "request_rows has 2 dimensions, must have 1"),
      plan_with(
          "shape_null", &W::rows, [](DLTensor& t) { t.shape = nullptr; },
          "request_rows: shape is null"),
      plan_with(
          "negative", &W::out_slots, [](DLTensor& t) { t.shape[0] = -1; },
          "out_slots: shape[0] is -1"),
      plan_with(
          "huge", &W::out_slots, [](DLTensor& t) { t.shape[0] = kHuge; },
          "out_slots: shape[0] is 1152921504606846976"),
      plan_with(
          "short", &W::out_slots, [](DLTensor& t) { t.shape[0] = 4; },
          "out_slots has 4 elements, the batch needs 5"),
      plan_with(
          "gaps", &W::positions, [](DLTensor& t) { t.strides[0] = 2; },
          "positions: strides[0] is 2, must be 1"),
      plan_with(
          "data_null", &W::kv_lens, [](DLTensor& t) { t.data = nullptr; }, "kv_lens: data is null"),
      plan_with(
          "byte_offset", &W::kv_lens, [](DLTensor& t) { t.byte_offset = 2; },
          "(byte_offset 2), must be aligned to 4 bytes"),
      plan_with(
          "byte_offset_huge", &W::kv_lens, [](DLTensor& t) { t.byte_offset = UINT64_MAX; },
          "kv_lens: byte_offset is 18446744073709551615"),
      plan_with(
          "table_rows_overlap", &W::slots, [](DLTensor& t) { t.strides[0] = 3; },
          "table: strides[0] is 3, a row has 4 entries"),
      plan_with(
          "table_narrow", &W::slots, [](DLTensor& t) { t.shape[1] = 3; }, "a row of table has 12"),
  };
}

std::vector<Misuse> misused_tensors() {
  using W = SmallWorld;
  return {
      forward_with(
          "device_of_q", &W::q,
          [](DLTensor& t) {
            t.device = {kDLCUDA, 1};
          },
          "q is on device_type 2, device_id 1, must be on cpu"),
      forward_with(
          "dtype_of_q", &W::q,
          [](DLTensor& t) {
            t.dtype = {kDLBfloat, 16, 1};
          },
          "q is bf16"),
      forward_with(
          "unknown_dtype", &W::q,
          [](DLTensor& t) {
            t.dtype = {kDLComplex, 64, 1};
          },
          "q: dtype is (code 5, 64 bits)"),
      forward_with(
          "few_tokens", &W::q, [](DLTensor& t) { t.shape[0] = 4; },
          "q has the shape [4, 4, 32], must be [5 or more, 4, 32]"),
      forward_with(
          "heads", &W::k, [](DLTensor& t) { t.shape[1] = 3; },
          "k has the shape [5, 3, 32], must be [5 or more, 2, 32]"),
      forward_with(
          "head_dim", &W::v, [](DLTensor& t) { t.shape[2] = 16; }, "v has the shape [5, 2, 16]"),
      forward_with(
          "inner_stride", &W::v, [](DLTensor& t) { t.strides[2] = 2; },
          "v: strides[2] is 2, must be 1"),
      forward_with(
          "overlapping_rows", &W::out, [](DLTensor& t) { t.strides[1] = 1; }, "out has strides of"),
      forward_with(
          "misaligned", &W::out, [](DLTensor& t) { t.data = static_cast<char*>(t.data) + 1; },
          "must be aligned to 4 bytes"),
      forward_with(
          "stride_beyond_memory", &W::q, [](DLTensor& t) { t.strides[0] = INT64_MAX; }, "q"),
      forward_with(
          "lse_with_gaps", &W::lse, [](DLTensor& t) { t.strides[0] = 8; },
          "lse: strides[0] is 8, must be 4"),
      forward_with(
          "few_sinks", &W::sinks, [](DLTensor& t) { t.shape[0] = 3; },
          "sinks has the shape [3], must be [4 or more]"),
      forward_with(
          "sin_unlike_cos", &W::sin, [](DLTensor& t) { t.shape[0] = 63; },
          "rotary.sin has the shape [63, 16], rotary.cos [64, 16]"),
      forward_with(
          "few_positions", &W::rotary_positions, [](DLTensor& t) { t.shape[0] = 4; },
          "rotary.positions has 4 elements, the batch needs 5"),
  };
}

}  // namespace fovea::test
