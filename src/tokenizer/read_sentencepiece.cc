// SPDX-License-Identifier: Apache-2.0
// Reads the ModelProto of sentencepiece (sentencepiece_model.proto).
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "tokenizer/protobuf.h"
#include "tokenizer/tokenizer_document.h"
#include "tokenizer/tokenizer_files.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

constexpr std::string_view kSpace = "\u2581";
constexpr size_t kMaxBytes = 256'000'000;

enum class PieceType : uint8_t { normal = 1, unknown, control, user_defined, unused, byte };

struct Piece {
  std::string_view text;
  float score = 0;
  PieceType type = PieceType::normal;
};

struct ModelProto {
  std::vector<Piece> pieces;  // per id
  // Fields of the trainer.
  bool is_unigram = true;
  bool byte_fallback = false;
  int32_t unk_id = 0, bos_id = 1, eos_id = 2;
  // Fields of the normalizer.
  std::string_view charsmap;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
};

class Reader {
 public:
  Reader(std::string_view bytes, std::string_view name) : name_(name) {
    if (bytes.size() > kMaxBytes) {
      fail(ErrorCode::corrupt_file, "{}: {} bytes, the limit is {}", name, bytes.size(), kMaxBytes);
    }
    ProtobufReader fields(bytes, name);
    while (const auto field = fields.next()) {
      if (field->number == 1) read_piece(field->bytes);
      if (field->number == 2) read_trainer(field->bytes);
      if (field->number == 3) read_normalizer(field->bytes);
    }
    if (proto_.pieces.empty()) {
      fail(ErrorCode::corrupt_file, "{}: is no model of sentencepiece, it has no pieces", name);
    }
  }

  ModelProto take() { return std::move(proto_); }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail(ErrorCode::unsupported, "{}: {} is not supported", name_, what);
  }

  void read_piece(std::string_view bytes) {
    Piece piece;
    uint64_t type = 1;
    ProtobufReader fields(bytes, name_);
    while (const auto field = fields.next()) {
      if (field->number == 1) piece.text = field->bytes;
      if (field->number == 2) {
        piece.score = std::bit_cast<float>(static_cast<uint32_t>(field->integer));
      }
      if (field->number == 3) type = field->integer;
    }
    const size_t id = proto_.pieces.size();
    if (type < 1 || type > 6) refuse(fmt::format("piece {} of the type {}", id, type));
    piece.type = static_cast<PieceType>(type);
    if (piece.text.empty() || replace_broken_utf8(piece.text) != piece.text ||
        !std::isfinite(piece.score) || id == kMaxTokens) {
      fail(ErrorCode::corrupt_file,
           "{}: piece {} is {} with the score {}, must be one of {} texts in UTF-8 with a finite "
           "score",
           name_, id, quote(piece.text), piece.score, kMaxTokens);
    }
    proto_.pieces.push_back(piece);
  }

  void read_trainer(std::string_view bytes) {
    ProtobufReader fields(bytes, name_);
    while (const auto field = fields.next()) {
      const auto id = static_cast<int32_t>(field->integer);
      if (field->number == 3) {
        if (field->integer != 1 && field->integer != 2) {
          refuse(fmt::format("the model type {}", field->integer));
        }
        proto_.is_unigram = field->integer == 1;
      }
      if (field->number == 24 && field->integer != 0) refuse("treat_whitespace_as_suffix");
      if (field->number == 35) proto_.byte_fallback = field->integer != 0;
      if (field->number == 40) proto_.unk_id = id;
      if (field->number == 41) proto_.bos_id = id;
      if (field->number == 42) proto_.eos_id = id;
    }
  }

  void read_normalizer(std::string_view bytes) {
    ProtobufReader fields(bytes, name_);
    while (const auto field = fields.next()) {
      if (field->number == 2) proto_.charsmap = field->bytes;
      if (field->number == 3) proto_.add_dummy_prefix = field->integer != 0;
      if (field->number == 4) proto_.remove_extra_whitespaces = field->integer != 0;
      if (field->number == 5 && field->integer == 0) refuse("escape_whitespaces false");
    }
  }

  std::string_view name_;
  ModelProto proto_;
};

// Calls `pair(left, right)` with the ids for every way to cut a piece into two pieces.
class Cuts {
 public:
  explicit Cuts(const std::vector<Piece>& pieces) {
    reversed_.reserve(pieces.size());
    std::vector<ByteTrie::Key> keys, reversed_keys;
    for (size_t id = 0; id < pieces.size(); ++id) {
      reversed_.emplace_back(pieces[id].text.rbegin(), pieces[id].text.rend());
      if (pieces[id].type != PieceType::normal) continue;
      keys.push_back({pieces[id].text, static_cast<int32_t>(id)});
      reversed_keys.push_back({reversed_.back(), static_cast<int32_t>(id)});
    }
    beginnings_ = ByteTrie(std::move(keys));
    ends_ = ByteTrie(std::move(reversed_keys));
  }

  template <typename Pair>
  void for_each(std::string_view text, const Pair& pair) {
    // Per length: the piece that is a prefix of the text.
    lefts_.assign(text.size(), ByteTrie::kNone);
    int32_t node = ByteTrie::kRoot;
    for (size_t at = 0; at + 1 < text.size(); ++at) {
      node = beginnings_.child(node, text[at]);
      if (node == ByteTrie::kNone) break;
      lefts_[at + 1] = beginnings_.value(node);
    }
    node = ByteTrie::kRoot;
    for (size_t at = text.size(); at > 1; --at) {
      node = ends_.child(node, text[at - 1]);
      if (node == ByteTrie::kNone) break;
      const int32_t right = ends_.value(node);
      if (right != ByteTrie::kNone && lefts_[at - 1] != ByteTrie::kNone) {
        pair(lefts_[at - 1], right);
      }
    }
  }

 private:
  std::vector<std::string> reversed_;
  ByteTrie beginnings_, ends_;
  std::vector<int32_t> lefts_;
};

// sentencepiece joins the neighbours whose piece has the best score, and the leftmost of equal
// ones.
MergeTable merges_by_score(const std::vector<Piece>& pieces) {
  std::vector<float> scores;
  for (const Piece& piece : pieces) scores.push_back(piece.score);
  std::ranges::sort(scores, std::greater<>());
  scores.erase(std::unique(scores.begin(), scores.end()), scores.end());

  struct Found {
    int32_t left = 0, right = 0;
    Merge merge;
  };
  std::vector<Found> found;
  Cuts cuts(pieces);
  for (size_t id = 0; id < pieces.size(); ++id) {
    if (pieces[id].type != PieceType::normal) continue;
    const auto rank = std::ranges::lower_bound(scores, pieces[id].score, std::greater<>());
    const Merge merge = {static_cast<int32_t>(rank - scores.begin()), static_cast<int32_t>(id)};
    cuts.for_each(pieces[id].text, [&](int32_t left, int32_t right) {
      found.push_back({left, right, merge});
    });
  }
  MergeTable table(found.size());
  for (const Found& each : found) table.add(each.left, each.right, each.merge);
  return table;
}

TokenizerModel make_model(const ModelProto& proto, std::string_view name) {
  Vocabulary vocabulary;
  std::vector<double> scores;
  for (const Piece& piece : proto.pieces) {
    const auto id = static_cast<int32_t>(scores.size());
    if (piece.type == PieceType::unused) {
      vocabulary.set_text(id, piece.text);
      if (!proto.is_unigram) {
        fail(ErrorCode::unsupported, "{}: the unused piece {} of a BPE model is not supported",
             name, quote(piece.text));
      }
    } else {
      vocabulary.add(piece.text, id);
    }
    // Only normal pieces occur in texts; the others are added tokens or represent bytes.
    scores.push_back(piece.type == PieceType::normal ? static_cast<double>(piece.score)
                                                     : -std::numeric_limits<double>::infinity());
  }
  const bool has_unk = proto.unk_id >= 0 && static_cast<size_t>(proto.unk_id) < scores.size();
  if (proto.is_unigram) {
    return UnigramModel(std::move(vocabulary), std::move(scores),
                        has_unk ? std::optional(proto.unk_id) : std::nullopt, proto.byte_fallback);
  }
  BpeOptions options;
  if (has_unk) options.unk_token = proto.pieces[static_cast<size_t>(proto.unk_id)].text;
  options.fuse_unk = true;
  options.byte_fallback = proto.byte_fallback;
  return BpeModel(std::move(vocabulary), merges_by_score(proto.pieces), std::move(options));
}

Normalizer make_normalizer(const ModelProto& proto, std::string_view name) {
  Normalizer normalizer;
  if (!proto.charsmap.empty()) {
    normalizer.add(Charsmap(proto.charsmap, name, CharsmapMatch::longest));
  }
  if (proto.remove_extra_whitespaces) normalizer.add(SingleSpacesStep());
  if (proto.add_dummy_prefix) normalizer.add(PrependStep{" ", true});
  normalizer.add(ReplaceStep{Pattern::from_literal(" ", name), std::string(kSpace)});
  return normalizer;
}

Decoder make_decoder(const ModelProto& proto, std::string_view name) {
  Decoder decoder;
  decoder.add(ReplaceDecoder{Pattern::from_literal(kSpace, name), " "});
  decoder.add(ByteFallbackDecoder());
  decoder.add(FuseDecoder());
  if (proto.add_dummy_prefix) decoder.add(StripDecoder{" ", 1, 0});
  return decoder;
}

}  // namespace

TokenizerParts read_sentencepiece(std::string_view bytes, std::string_view name,
                                  const TokenizerSettings& settings) {
  const ModelProto proto = Reader(bytes, name).take();
  TokenizerParts parts(make_model(proto, name));
  parts.normalizer = make_normalizer(proto, name);
  parts.decoder = make_decoder(proto, name);
  std::vector<AddedToken> added;
  for (size_t id = 0; id < proto.pieces.size(); ++id) {
    const Piece& piece = proto.pieces[id];
    AddedToken token{.id = static_cast<int32_t>(id), .content = std::string(piece.text)};
    token.special = piece.type == PieceType::control || piece.type == PieceType::unknown;
    token.normalized = piece.type == PieceType::user_defined;
    if (token.special || token.normalized) added.push_back(std::move(token));
  }
  parts.set_added_tokens(with_settings(std::move(added), parts.vocabulary(), settings, name), name);
  const auto is_control = [&](int32_t id) {
    return id >= 0 && static_cast<size_t>(id) < proto.pieces.size() &&
           proto.pieces[static_cast<size_t>(id)].type == PieceType::control;
  };
  if (settings.add_bos.value_or(true) && is_control(proto.bos_id)) {
    parts.prefix.push_back(proto.bos_id);
  }
  if (settings.add_eos.value_or(false) && is_control(proto.eos_id)) {
    parts.suffix.push_back(proto.eos_id);
  }
  return parts;
}

}  // namespace fovea
