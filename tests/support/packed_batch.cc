// SPDX-License-Identifier: Apache-2.0
#include "support/packed_batch.h"

#include <algorithm>
#include <cstring>

#include "core/float_types.h"

namespace fovea::test {
namespace {

constexpr int64_t kRowGap = 16;    // elements between rows of strided tensors
constexpr int64_t kExtraRows = 2;  // after the last token of every tensor

std::vector<char> as_dtype(const std::vector<float>& values, DType dtype) {
  std::vector<char> bytes(values.size() * dtype_bytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    store_float(bytes.data(), dtype, static_cast<int64_t>(i), values[i]);
  }
  return bytes;
}

template <typename T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Appends entries that must not be read.
void append_wild(std::vector<int32_t>& array, Fill fill) {
  const std::vector<int32_t> tail = index_array(3, fill);
  array.insert(array.end(), tail.begin(), tail.end());
}

}  // namespace

std::vector<Piece> whole_case(const AttentionCase& test) {
  std::vector<Piece> pieces;
  for (size_t request = 0; request < test.requests.size(); ++request) {
    pieces.push_back({request, 0, test.requests[request].q_len});
  }
  return pieces;
}

PackedRows::PackedRows(int64_t tokens, int32_t heads, int32_t width, DType dtype, bool strided,
                       Fill fill)
    : heads_(heads), width_(width), fill_(fill_byte(fill)) {
  const int64_t head_stride = width + (strided ? kRowGap : 0);
  const int64_t token_stride = heads * head_stride + (strided ? kRowGap : 0);
  bytes_.assign(static_cast<size_t>((tokens + kExtraRows) * token_stride) * dtype_bytes(dtype),
                static_cast<char>(fill_));
  rows_ = {bytes_.data(), dtype, token_stride, head_stride};
}

void PackedRows::set_token(int64_t token, const float* from) {
  for (int32_t head = 0; head < heads_; ++head) {
    char* to = row_address(rows_, token, head);
    for (int32_t d = 0; d < width_; ++d) store_float(to, rows_.dtype, d, *from++);
  }
}

void PackedRows::get_token(int64_t token, std::vector<float>& to) const {
  for (int32_t head = 0; head < heads_; ++head) {
    const char* from = row_address(rows_, token, head);
    for (int32_t d = 0; d < width_; ++d) to.push_back(load_float(from, rows_.dtype, d));
  }
}

bool PackedRows::untouched_outside(int64_t tokens) const {
  std::vector<char> rest = bytes_;
  const size_t row_bytes = static_cast<size_t>(width_) * dtype_bytes(rows_.dtype);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int32_t head = 0; head < heads_; ++head) {
      const auto at = row_address(rows_, token, head) - bytes_.data();
      std::memset(rest.data() + at, fill_, row_bytes);
    }
  }
  return std::all_of(rest.begin(), rest.end(),
                     [this](char byte) { return byte == static_cast<char>(fill_); });
}

bool same_bits(const Output& a, const Output& b) {
  return same_bytes(a.out, b.out) && same_bytes(a.lse, b.lse);
}

PackedBatch::PackedBatch(const AttentionCase& test, const CaseData& data, const PagedStore* store,
                         const std::vector<Piece>& pieces, Fill fill)
    : test_(test),
      data_(data),
      fill_(fill),
      store_(store),
      sinks_(data.sinks),
      alibi_slopes_(data.alibi_slopes),
      cos_(data.rotary.cos),
      sin_(data.rotary.sin) {
  add_requests(store, pieces);
  add_masks(pieces);
  add_rows(pieces);
}

void PackedBatch::add_requests(const PagedStore* store, const std::vector<Piece>& pieces) {
  const bool cross = test_.spec.scope == AttentionScope::cross;
  requests_ = static_cast<int32_t>(pieces.size());
  q_indptr_.push_back(0);
  for (const Piece& piece : pieces) {
    const RequestData& request = data_.requests[piece.request];
    tokens_ += piece.end - piece.begin;
    q_indptr_.push_back(tokens_);
    q_lens_.push_back(piece.end - piece.begin);
    kv_lens_.push_back(cross ? piece.end : request.cached() + piece.end);
    encoder_lens_.push_back(request.kv_len);
    max_q_len_ = std::max(max_q_len_, piece.end - piece.begin);
    max_kv_len_ = std::max(max_kv_len_, kv_lens_.back());
    if (!store) continue;
    request_rows_.push_back(store->row(piece.request));
    shared_.push_back(shared_with_last(*store, pieces, shared_.size()));
    for (int32_t token = piece.begin; token < piece.end; ++token) {
      const int32_t key = request.cached() + token;
      const bool skip = cross || key < 0 || PagedStore::is_written_before(test_, request, key);
      out_slots_.push_back(skip ? -1 : store->slot(piece.request, key));
    }
  }
  if (cross) {
    decoder_slots_ = index_array(
        static_cast<size_t>(store->table_stride()) * (data_.requests.size() + 2), fill_);
  }
  append_wild(q_indptr_, fill_);
  append_wild(kv_lens_, fill_);
  append_wild(request_rows_, fill_);
  append_wild(encoder_lens_, fill_);
  append_wild(shared_, fill_);
  out_slots_.insert(out_slots_.end(), 3, fill_ == Fill::poison ? int64_t{1} << 60 : 0);
}

// Returns the number of tokens in the same slots as those of the previous piece.
int32_t PackedBatch::shared_with_last(const PagedStore& store, const std::vector<Piece>& pieces,
                                      size_t piece) const {
  if (test_.prefix_levels == 0) return 0;
  if (piece == 0) return 12345;  // ignored
  const size_t request = pieces[piece].request, last = pieces[piece - 1].request;
  const auto length = [&](size_t i) {
    return data_.requests[pieces[i].request].cached() + pieces[i].end;
  };
  int32_t shared = 0;
  while (shared < std::min(length(piece), length(piece - 1)) &&
         store.slot(request, shared) == store.slot(last, shared)) {
    ++shared;
  }
  return shared;
}

void PackedBatch::add_masks(const std::vector<Piece>& pieces) {
  custom_indptr_.push_back(0);
  span_indptr_.push_back(0);
  // The stride of the whole case, because a captured pass keeps it.
  for (const RequestData& request : data_.requests) {
    pos_in_items_stride_ = std::max<int64_t>(pos_in_items_stride_, request.kv_len + 1);
  }
  for (const Piece& piece : pieces) {
    const RequestData& request = data_.requests[piece.request];
    const int32_t kv_len = request.cached() + piece.end;
    for (int32_t token = piece.begin; token < piece.end; ++token) {
      if (!request.positions.empty()) positions_.push_back(request.positions[token]);
      if (test_.spec.mask == MaskKind::tree && !request.parents.empty()) {
        uint64_t bits = 0;
        for (int32_t node = token; node >= 0; node = request.parents[node]) {
          bits |= uint64_t{1} << node;
        }
        tree_.push_back(bits);
      }
      if (test_.spec.mask == MaskKind::custom) {
        const auto row = request.custom_mask.begin() + static_cast<int64_t>(token) * request.kv_len;
        custom_.insert(custom_.end(), row, row + kv_len);
      }
    }
    custom_indptr_.push_back(static_cast<int64_t>(custom_.size()));
    for (const auto& [begin, end] : request.spans) {
      spans_.push_back(begin);
      spans_.push_back(end);
    }
    span_indptr_.push_back(static_cast<int32_t>(spans_.size() / 2));
    item_prefix_.push_back(request.item_prefix);
    std::vector<uint16_t> items = request.pos_in_item;
    items.resize(static_cast<size_t>(pos_in_items_stride_),
                 fill_ == Fill::poison ? uint16_t{0xffff} : uint16_t{0});
    pos_in_items_.insert(pos_in_items_.end(), items.begin(), items.end());
  }
}

void PackedBatch::add_rows(const std::vector<Piece>& pieces) {
  const AttentionSpec& spec = test_.spec;
  const int32_t q_size = q_width(spec);
  const int32_t rope = test_.split_q ? spec.mla.rope_dim : 0;
  const auto rows = [&](int32_t heads, int32_t width) {
    return PackedRows(tokens_, heads, width, activation_dtype(spec), test_.strided, fill_);
  };
  q_ = PackedRows(tokens_, spec.q_heads, q_size - rope, spec.q_dtype, test_.strided, fill_);
  if (rope > 0) q_rope_ = rows(spec.q_heads, rope);
  const bool dual = spec.dual_chunk && !spec.has_rope;
  if (dual) {
    q_succ_ = PackedRows(tokens_, spec.q_heads, q_size, spec.q_dtype, test_.strided, fill_);
    q_inter_ = PackedRows(tokens_, spec.q_heads, q_size, spec.q_dtype, test_.strided, fill_);
  }
  k_ = rows(spec.kv_heads, k_width(spec));
  if (v_width(spec) > 0) v_ = rows(spec.kv_heads, v_width(spec));
  out_ = rows(spec.q_heads, out_width(spec));
  lse_.assign(static_cast<size_t>(tokens_) * spec.q_heads, 0);
  // memset must not get the null pointer of an empty vector.
  if (!lse_.empty()) std::memset(lse_.data(), fill_byte(fill_), lse_.size() * sizeof(float));
  w_uk_ = as_dtype(data_.w_uk, spec.q_dtype);
  w_uv_ = as_dtype(data_.w_uv, spec.q_dtype);

  int64_t row = 0;
  for (const Piece& piece : pieces) {
    const RequestData& request = data_.requests[piece.request];
    for (int32_t token = piece.begin; token < piece.end; ++token, ++row) {
      std::vector<float> front, back;
      const std::vector<float>& all_q = spec.has_rope ? request.given_q : request.q;
      const std::vector<float>& all_k = spec.has_rope ? request.given_k : request.k;
      const std::vector<float>& all_v = spec.has_rope ? request.given_v : request.v;
      const float* q = &all_q[static_cast<size_t>(token) * spec.q_heads * q_size];
      for (int32_t head = 0; head < spec.q_heads; ++head, q += q_size) {
        front.insert(front.end(), q, q + q_size - rope);
        back.insert(back.end(), q + q_size - rope, q + q_size);
      }
      q_.set_token(row, front.data());
      if (dual) {
        const size_t at = static_cast<size_t>(token) * spec.q_heads * q_size;
        q_succ_.set_token(row, &request.q_succ[at]);
        q_inter_.set_token(row, &request.q_inter[at]);
      }
      if (!request.q_scale.empty()) {
        const auto scale = request.q_scale.begin() + static_cast<int64_t>(token) * spec.q_heads;
        q_scale_.insert(q_scale_.end(), scale, scale + spec.q_heads);
      }
      if (rope > 0) q_rope_.set_token(row, back.data());
      // The k and v of tokens that are not stored keep the fill.
      const int32_t key = request.cached() + token;
      rotary_positions_.push_back(rotary_position(request, token));
      if (spec.scope == AttentionScope::cross || key < 0) continue;
      if (is_cached(spec) && PagedStore::is_written_before(test_, request, key)) continue;
      const auto kv_row = static_cast<size_t>(key) * spec.kv_heads;
      k_.set_token(row, &all_k[kv_row * k_width(spec)]);
      if (v_width(spec) > 0) v_.set_token(row, &all_v[kv_row * v_width(spec)]);
    }
  }
  append_wild(rotary_positions_, fill_);
}

BatchView PackedBatch::view() const {
  BatchView view;
  const PackedBatch& bounds = bounds_ ? *bounds_ : *this;
  view.hints.max_q_len = bounds.max_q_len_;
  // A mixed case whose pieces are all single tokens is a decode batch.
  view.mode = test_.mode == ForwardMode::mixed && view.hints.max_q_len == 1 ? ForwardMode::decode
                                                                            : test_.mode;
  view.requests = requests_;
  view.tokens = tokens_;
  view.hints.max_kv_len = bounds.max_kv_len_;
  if (tells_host_lens_) {
    view.hints.host_q_lens = bounds.q_lens_;
    view.hints.host_kv_lens = bounds.kv_lens_;
  }
  view.q_indptr = q_indptr_;
  if (test_.spec.scope != AttentionScope::cross) view.kv_lens = kv_lens_;
  if (store_) {
    add_tables(view);
    view.request_rows = request_rows_;
    view.out_slots = out_slots_;
    if (test_.prefix_levels > 0) view.hints.shared_prefix = shared_;
  }
  if (test_.spec.scope == AttentionScope::cross) view.cross.lens = encoder_lens_;
  if (!positions_.empty()) view.positions = positions_;
  switch (test_.spec.mask) {
    case MaskKind::none:
      break;
    case MaskKind::tree:
      if (!tree_.empty()) view.masks.tree.ancestors = tree_;
      break;
    case MaskKind::custom:
      view.masks.custom.visible = custom_;
      view.masks.custom.indptr = custom_indptr_;
      break;
    case MaskKind::prefix_spans:
      view.masks.spans.bounds = spans_;
      view.masks.spans.indptr = span_indptr_;
      break;
    case MaskKind::multi_item:
      view.masks.items.prefix_lens = item_prefix_;
      view.masks.items.token_pos = pos_in_items_;
      view.masks.items.stride = pos_in_items_stride_;
      break;
  }
  return view;
}

void PackedBatch::add_tables(BatchView& view) const {
  const bool pages = tables_ == Tables::pages;
  const TokenTable table = {.entries = pages ? store_->page_table() : store_->table(),
                            .stride = pages ? store_->page_table_stride() : store_->table_stride(),
                            .entry_tokens = pages ? test_.cache.page_size : 1,
                            .rows = store_->table_rows()};
  view.table = table;
  if (test_.spec.scope != AttentionScope::cross) return;
  view.cross.table = table;
  view.table.entries = decoder_slots_.data();
}

LayerTensors PackedBatch::tensors() {
  LayerTensors tensors;
  tensors.layer = PagedStore::kLayer;
  tensors.q = q_.rows();
  if (!q_scale_.empty()) tensors.q_scale.data = q_scale_.data();
  tensors.q_scale.token_stride = test_.spec.q_heads;
  tensors.q_scale.head_stride = 1;
  tensors.mla.q_rope = q_rope_.rows();
  tensors.dual_chunk.q_succ = q_succ_.rows();
  tensors.dual_chunk.q_inter = q_inter_.rows();
  if (test_.spec.scope != AttentionScope::cross) {
    (is_mla(test_.spec) ? tensors.mla.latent : tensors.k) = k_.rows();
    (is_mla(test_.spec) ? tensors.mla.k_rope : tensors.v) = v_.rows();
  }
  tensors.out = out_.rows();
  tensors.lse = NaturalLse(test_.spec.needs_lse ? lse_.data() : nullptr);
  tensors.save_kv = !test_.prewritten;
  if (test_.spec.scores.has_sinks) tensors.scores.sinks = sinks_.data();
  if (test_.spec.scores.has_alibi) tensors.scores.alibi_slopes = alibi_slopes_.data();
  if (test_.spec.has_rope) {
    tensors.rotary = {cos_.data(),
                      sin_.data(),
                      data_.rotary.positions,
                      data_.rotary.rotary_dim,
                      test_.rope_interleaved,
                      rotary_positions_.data()};
  }
  if (has_mla_weights(test_.spec)) {
    tensors.mla.weights.dtype = test_.spec.q_dtype;
    tensors.mla.weights.w_uk = w_uk_.data();
    tensors.mla.weights.w_uv = w_uv_.data();
  }
  return tensors;
}

Output PackedBatch::output() const {
  Output output;
  for (int64_t token = 0; token < tokens_; ++token) out_.get_token(token, output.out);
  if (test_.spec.needs_lse) output.lse = lse_;
  return output;
}

std::vector<std::span<std::byte>> PackedBatch::memory() {
  std::vector<std::span<std::byte>> blocks;
  const auto add = [&](auto&... arrays) {
    (blocks.push_back(std::as_writable_bytes(std::span(arrays))), ...);
  };
  add(q_indptr_, kv_lens_, request_rows_, shared_, encoder_lens_, positions_, decoder_slots_,
      out_slots_, tree_, custom_, custom_indptr_, spans_, span_indptr_, item_prefix_, pos_in_items_,
      lse_, w_uk_, w_uv_, q_scale_, sinks_, alibi_slopes_, cos_, sin_, rotary_positions_);
  for (PackedRows* rows : {&q_, &q_rope_, &q_succ_, &q_inter_, &k_, &v_, &out_})
    blocks.push_back(rows->memory());
  return blocks;
}

std::vector<std::byte> PackedBatch::inputs() {
  std::vector<const void*> written = {lse_.data(), out_.rows().data};
  if (test_.spec.has_rope) written.insert(written.end(), {q_.rows().data, q_rope_.rows().data});
  std::vector<std::byte> bytes;
  for (const std::span<std::byte> block : memory()) {
    if (std::ranges::find(written, block.data()) != written.end()) continue;
    bytes.insert(bytes.end(), block.begin(), block.end());
  }
  return bytes;
}

bool PackedBatch::untouched_outside() const { return out_.untouched_outside(tokens_); }

}  // namespace fovea::test
