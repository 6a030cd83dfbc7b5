// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "tokenizer/read_steps.h"
#include "tokenizer/tokenizer_document.h"
#include "tokenizer/tokenizer_files.h"

namespace fovea {
namespace {

constexpr size_t kMaxTemplateTokens = 1024;  // tokens that a post-processor adds to every text

class Reader {
 public:
  Reader(std::string_view text, std::string_view name)
      : name_(name), document_(parse_tokenizer_document(text, name)), root_(*document_.root) {}

  TokenizerParts read(const TokenizerSettings& settings) {
    TokenizerParts parts(read_model(root_.object("model")));
    if (root_.has("normalizer")) {
      parts.normalizer = read_normalizer(root_.object("normalizer"), name_);
    }
    parts.set_added_tokens(
        with_settings(std::move(document_.added), parts.vocabulary(), settings, name_), name_);
    if (root_.has("pre_tokenizer")) {
      parts.pre_tokenizer = read_pre_tokenizer(root_.object("pre_tokenizer"), name_);
    }
    std::optional<JsonObject> decoder;
    if (root_.has("decoder")) decoder = root_.object("decoder");
    parts.decoder = read_decoder(decoder, name_);
    if (root_.has("post_processor")) read_post_processor(root_.object("post_processor"), parts);
    return parts;
  }

 private:
  [[noreturn]] void refuse(std::string_view what) const {
    fail(ErrorCode::unsupported, "{}: {} is not supported", name_, what);
  }

  template <typename... Args>
  [[noreturn]] void corrupt(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::corrupt_file, "{}: {}", name_,
         fmt::format(format, std::forward<Args>(args)...));
  }

  TokenizerModel read_model(const JsonObject& model) {
    const std::string type = model.text_or("type", document_.is_unigram ? "Unigram" : "BPE");
    if (type != "BPE" && type != "Unigram") refuse("model type " + quote(type));
    if (!document_.has_vocabulary) corrupt("model.vocab is missing");
    if (document_.is_unigram != (type == "Unigram")) {
      corrupt("model.vocab is {}, which is not that of the model type {}",
              document_.is_unigram ? "an array" : "an object", type);
    }
    return type == "BPE" ? TokenizerModel(read_bpe(model)) : TokenizerModel(read_unigram(model));
  }

  BpeModel read_bpe(const JsonObject& model) {
    for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (!model.text_or(field, "").empty()) refuse(fmt::format("model.{}", field));
    }
    if (model.has("dropout") && !dropout_is_zero(model)) refuse("model.dropout");
    BpeOptions options;
    if (model.has("unk_token")) options.unk_token = model.text("unk_token");
    options.fuse_unk = model.boolean_or("fuse_unk", false);
    options.byte_fallback = model.boolean_or("byte_fallback", false);
    options.ignore_merges = model.boolean_or("ignore_merges", false);
    if (!document_.merges) corrupt("model.merges is missing");
    MergeTable merges = read_merges();
    document_.merges.reset();
    return BpeModel(std::move(document_.vocabulary), std::move(merges), std::move(options));
  }

  static bool dropout_is_zero(const JsonObject& model) {
    const auto& value = model.value("dropout");
    return value.is_number() && value.get<double>() == 0;
  }

  MergeTable read_merges() const {
    const Vocabulary& vocabulary = document_.vocabulary;
    MergeTable table(document_.merges->size());
    std::string joined;
    for (size_t rank = 0; rank < document_.merges->size(); ++rank) {
      const auto id = [&](std::string_view token) {
        const int32_t found = vocabulary.find(token);
        if (found == Vocabulary::kNone) {
          corrupt("model.merges[{}]: {} is not in the vocabulary", rank, quote(token));
        }
        return found;
      };
      const auto [left, right] = document_.merges->pair(rank);
      joined.assign(left).append(right);
      table.add(id(left), id(right), {static_cast<int32_t>(rank), id(joined)});
    }
    return table;
  }

  UnigramModel read_unigram(const JsonObject& model) {
    std::optional<int32_t> unk;
    const auto tokens = static_cast<int64_t>(document_.scores.size());
    if (model.has("unk_id")) {
      unk = static_cast<int32_t>(model.integer("unk_id", 0, std::max<int64_t>(tokens, 1) - 1));
      if (tokens == 0) corrupt("model.vocab is empty");
    }
    return UnigramModel(std::move(document_.vocabulary), std::move(document_.scores), unk,
                        model.boolean_or("byte_fallback", false));
  }

  void read_post_processor(const JsonObject& item, TokenizerParts& parts) const {
    const std::string type = item.text("type");
    if (type == "Sequence") {
      for (const JsonObject& step : item.objects("processors")) read_post_processor(step, parts);
    } else if (type == "TemplateProcessing") {
      read_template(item, parts);
    } else if (type != "ByteLevel") {  // ByteLevel changes offsets only
      refuse("post_processor " + quote(type));
    }
  }

  void read_template(const JsonObject& item, TokenizerParts& parts) const {
    std::vector<int32_t> prefix, suffix;
    bool has_text = false;
    for (const JsonObject& piece : item.objects("single")) {
      if (piece.has("Sequence")) {
        if (std::exchange(has_text, true) || piece.object("Sequence").text("id") != "A") {
          refuse("a post_processor that does not hold the text once");
        }
        continue;
      }
      const std::string id = piece.object("SpecialToken").text("id");
      const JsonObject token = item.object("special_tokens").object(id);
      auto& side = has_text ? suffix : prefix;
      for (const int64_t value : token.integers("ids", 0, kMaxTokens - 1)) {
        if (!parts.has(static_cast<int32_t>(value))) {
          corrupt("post_processor adds {}, whose id {} is no token", quote(id), value);
        }
        side.push_back(static_cast<int32_t>(value));
        if (parts.prefix.size() + prefix.size() + parts.suffix.size() + suffix.size() >
            kMaxTemplateTokens) {
          corrupt("post_processor puts more than {} tokens around a text", kMaxTemplateTokens);
        }
      }
    }
    if (!has_text) refuse("a post_processor that does not hold the text once");
    parts.prefix.insert(parts.prefix.begin(), prefix.begin(), prefix.end());
    parts.suffix.insert(parts.suffix.end(), suffix.begin(), suffix.end());
  }

  std::string_view name_;
  TokenizerDocument document_;
  const JsonObject& root_;
};

}  // namespace

TokenizerParts read_tokenizer_json(std::string_view json, std::string_view name,
                                   const TokenizerSettings& settings) {
  return Reader(json, name).read(settings);
}

}  // namespace fovea
