// SPDX-License-Identifier: Apache-2.0
#include "attention/validate/states.h"

#include <string>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "core/strided_rows.h"

namespace fovea {
namespace {

// Return the rows of a state, and its LSEs as one row.
StridedRows out_of(const AttentionState& state, const StateShape& shape, int64_t tokens) {
  return {.data = state.out.data,
          .element_bytes = static_cast<int64_t>(dtype_bytes(shape.dtype)),
          .row = shape.dim,
          .dimensions = {{{tokens, state.out.token_stride}, {shape.heads, state.out.head_stride}}}};
}
StridedRows lse_of(const AttentionState& state, const StateShape& shape, int64_t tokens) {
  return {.data = state.lse.data, .element_bytes = sizeof(float), .row = tokens * shape.heads};
}

void check_state(const AttentionState& state, const StateShape& shape, int64_t tokens,
                 std::string_view name) {
  const size_t bytes = dtype_bytes(shape.dtype);
  check_argument(state.out.data != nullptr, "{}.out is null", name);
  check_argument(state.out.dtype == shape.dtype, "{}.out is {}, the merger's shape has {}", name,
                 dtype_name(state.out.dtype), dtype_name(shape.dtype));
  check_argument(reinterpret_cast<uintptr_t>(state.out.data) % bytes == 0,
                 "{}.out is at {}, must be aligned to {} bytes", name, state.out.data, bytes);
  check_argument(bool{state.lse}, "{}.lse is null", name);
  check_aligned(state.lse.data, fmt::format("{}.lse", name));
  check_reach(out_of(state, shape, tokens), fmt::format("{}.out", name));
  check_reach(lse_of(state, shape, tokens), fmt::format("{}.lse", name));
}

// Throws if memory that merge() writes overlaps anything else.
void check_apart(const AttentionState& into, const AttentionState& part, const StateShape& shape,
                 int64_t tokens) {
  const StridedRows out = out_of(into, shape, tokens), lse = lse_of(into, shape, tokens);
  check_argument(are_disjoint(out),
                 "into.out has strides of {} a token and {} a head: rows of {} values overlap",
                 into.out.token_stride, into.out.head_stride, shape.dim);
  const std::pair<const char*, StridedRows> written[] = {{"into.out", out}, {"into.lse", lse}};
  const std::pair<const char*, StridedRows> read[] = {{"part.out", out_of(part, shape, tokens)},
                                                      {"part.lse", lse_of(part, shape, tokens)}};
  for (const auto& [name, rows] : written) {
    for (const auto& [other, others] : read) {
      check_argument(!share_memory(rows, others), "{} at {} shares memory with {} at {}", name,
                     rows.data, other, others.data);
    }
  }
  check_argument(!share_memory(out, lse), "into.out at {} shares memory with into.lse at {}",
                 out.data, lse.data);
}

}  // namespace

void check_tokens(int64_t tokens) {
  check_argument(tokens >= 0 && tokens <= INT32_MAX, "tokens is {}, must be in [0, {}]", tokens,
                 INT32_MAX);
}

void check_states(const AttentionState& into, const AttentionState& part, const StateShape& shape,
                  int64_t tokens) {
  check_state(into, shape, tokens, "into");
  check_state(part, shape, tokens, "part");
  check_apart(into, part, shape, tokens);
}

}  // namespace fovea
