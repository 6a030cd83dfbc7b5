// SPDX-License-Identifier: Apache-2.0
// Some new tokens of a case as one batch. Owns the arrays of a BatchView and the rows of a
// LayerTensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fovea/attention_backend.h"
#include "support/attention_case.h"
#include "support/paged_store.h"

namespace fovea::test {

// New tokens [begin, end) of one request. Tokens before `begin` are cached already.
struct Piece {
  size_t request = 0;
  int32_t begin = 0, end = 0;
};

// Returns all new tokens of all requests, in order.
std::vector<Piece> whole_case(const AttentionCase& test);

// Owns rows [token, head, width].
class PackedRows {
 public:
  PackedRows() = default;
  PackedRows(PackedRows&&) = default;
  PackedRows& operator=(PackedRows&&) = default;
  PackedRows(int64_t tokens, int32_t heads, int32_t width, DType dtype, bool strided, Fill fill);

  const HeadRows& rows() const { return rows_; }
  // Convert the heads of one token from and to fp32.
  void set_token(int64_t token, const float* from);
  void get_token(int64_t token, std::vector<float>& to) const;
  // Returns true if no byte outside the first `tokens` rows differs from the fill.
  bool untouched_outside(int64_t tokens) const;
  std::span<std::byte> memory() { return std::as_writable_bytes(std::span(bytes_)); }

 private:
  std::vector<char> bytes_;
  HeadRows rows_;
  int32_t heads_ = 0, width_ = 0;
  int fill_ = 0;
};

// The output of one batch in fp32, without padding.
struct Output {
  std::vector<float> out;  // [tokens, q_heads, out_width]
  std::vector<float> lse;  // [tokens, q_heads], empty unless asked for
};

// Compares bitwise.
bool same_bits(const Output& a, const Output& b);

// The kind of table that a batch has.
enum class Tables : uint8_t { slots, pages };

class PackedBatch {
 public:
  PackedBatch(const AttentionCase& test, const CaseData& data, const PagedStore* store,
              const std::vector<Piece>& pieces, Fill fill);

  BatchView view() const;  // points into this object
  // Passes the upper bounds of a batch that is at least as long, as in a captured pass.
  void take_bounds(const PackedBatch& longer) { bounds_ = &longer; }
  void give(Tables tables) { tables_ = tables; }  // default: slots
  void tell_host_lens() { tells_host_lens_ = true; }
  LayerTensors tensors();
  Output output() const;
  // Checks rows beyond the batch's tokens and gaps between rows.
  bool untouched_outside() const;
  // Returns every array that view() and tensors() point into, except the store's tables; always the
  // same number of blocks in the same order.
  std::vector<std::span<std::byte>> memory();
  // Returns the bytes that a pass only reads: no results, and no q that is rotated in place.
  std::vector<std::byte> inputs();
  const int32_t* own_table() const { return decoder_slots_.data(); }

 private:
  void add_tables(BatchView& view) const;
  void add_requests(const PagedStore* store, const std::vector<Piece>& pieces);
  int32_t shared_with_last(const PagedStore& store, const std::vector<Piece>& pieces,
                           size_t piece) const;
  void add_masks(const std::vector<Piece>& pieces);
  void add_rows(const std::vector<Piece>& pieces);

  const AttentionCase& test_;
  const CaseData& data_;
  const Fill fill_;
  const PagedStore* store_;
  Tables tables_ = Tables::slots;
  bool tells_host_lens_ = false;
  int32_t tokens_ = 0, requests_ = 0;
  int32_t max_q_len_ = 0, max_kv_len_ = 0;
  const PackedBatch* bounds_ = nullptr;  // null: this batch

  std::vector<int32_t> q_indptr_, q_lens_, kv_lens_, request_rows_, encoder_lens_, positions_,
      shared_;
  std::vector<int32_t> decoder_slots_;  // or pages; scope cross: must not be read
  std::vector<int64_t> out_slots_;
  std::vector<uint64_t> tree_;
  std::vector<uint8_t> custom_;
  std::vector<int64_t> custom_indptr_;
  std::vector<int32_t> spans_, span_indptr_;
  std::vector<uint32_t> item_prefix_;
  std::vector<uint16_t> pos_in_items_;
  int64_t pos_in_items_stride_ = 0;
  PackedRows q_, q_rope_, q_succ_, q_inter_, k_, v_, out_;
  std::vector<float> lse_, q_scale_;
  std::vector<char> w_uk_, w_uv_;  // in q_dtype
  std::vector<float> sinks_, alibi_slopes_;
  std::vector<float> cos_, sin_;
  std::vector<int32_t> rotary_positions_;
};

}  // namespace fovea::test
