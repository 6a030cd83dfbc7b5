// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tokenizer_document.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/check.h"
#include "core/quote.h"
#include "model/json.h"

namespace fovea {
namespace {

using nlohmann::json;

constexpr size_t kMaxDocumentBytes = 256'000'000;
constexpr int kMaxDepth = 32;
constexpr size_t kMaxValues = 1 << 18;  // applies outside of vocabulary, merges and added tokens
constexpr int64_t kLastToken = kMaxTokens - 1;

constexpr std::array<std::string_view, 5> kKept = {"normalizer", "pre_tokenizer", "post_processor",
                                                   "decoder", "model"};

// Handles the parser's events. Each belongs to a section: an ignored field, a list of its own, or
// the JSON that is kept.
class Handler : public nlohmann::json_sax<json> {
 public:
  Handler(std::string_view name, TokenizerDocument& document) : name_(name), document_(document) {}

  std::shared_ptr<const json> document() const { return root_; }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool value) override { return scalar(value); }
  bool number_integer(int64_t value) override { return scalar(value); }
  bool number_unsigned(uint64_t value) override { return scalar(value); }
  bool number_float(double value, const std::string&) override { return scalar(value); }
  bool binary(json::binary_t&) override { return false; }  // JSON has none

  bool string(std::string& value) override {
    switch (section_) {
      case Section::vocabulary:
        vocabulary_text(value);
        break;
      case Section::merges:
        merge_text(value);
        break;
      case Section::added:
        if (section_depth() == 2 && key_ == "content") {
          added_.content = std::move(value);
        } else {
          added_field(value);
        }
        break;
      case Section::kept:
        keep(std::move(value));
        break;
      case Section::skipped:
        break;
    }
    return ended();
  }

  bool start_object(size_t) override {
    open();
    if (section_ == Section::kept) {
      if (depth_ == 1) {
        *root_ = json::object();
        open_values_.push_back(root_.get());
      } else {
        open_values_.push_back(keep(json::object()));
      }
      seen_.emplace_back();
    } else if (section_ == Section::vocabulary) {
      if (section_depth() != 1) wrong_vocabulary("an object");
    } else if (section_ == Section::merges) {
      wrong_merge("an object");
    } else if (section_ == Section::added && section_depth() == 2) {
      added_ = AddedToken();
      added_normalized_.reset();
      added_id_.reset();
    }
    return true;
  }

  bool start_array(size_t) override {
    open();
    if (section_ == Section::kept) {
      if (depth_ == 1) corrupt("is an array, must be an object");
      open_values_.push_back(keep(json::array()));
    } else if (section_ == Section::vocabulary) {
      document_.is_unigram = true;
      if (section_depth() > 2) wrong_vocabulary("an array");
      entry_text_.reset();
      entry_score_.reset();
    } else if (section_ == Section::merges) {
      if (section_depth() > 2) wrong_merge("an array");
      pair_.clear();
    } else if (section_ == Section::added && section_depth() == 2) {
      corrupt("added_tokens[{}] is an array, must be an object", document_.added.size());
    }
    return true;
  }

  bool end_object() override {
    if (section_ == Section::kept) {
      open_values_.pop_back();
      seen_.pop_back();
    } else if (section_ == Section::added && section_depth() == 2) {
      end_added();
    }
    return close();
  }

  bool end_array() override {
    if (section_ == Section::kept) {
      open_values_.pop_back();
    } else if (section_ == Section::vocabulary && section_depth() == 2) {
      end_unigram_entry();
    } else if (section_ == Section::merges && section_depth() == 2) {
      if (pair_.size() != 2) wrong_merge(fmt::format("an array of {}", pair_.size()));
      document_.merges->add(pair_[0], pair_[1]);
    }
    return close();
  }

  bool key(std::string& value) override {
    if (section_ == Section::kept) {
      count_value();
      if (!seen_.back().insert(value).second) corrupt("key {} is there twice", quote(value));
      if (depth_ == 1) {
        top_key_ = value;
        begin_root_field(value);
      } else if (depth_ == 2 && top_key_ == "model") {
        begin_model_field(value);
      }
    }
    key_ = std::move(value);
    return true;
  }

  bool parse_error(size_t, const std::string&, const json::exception& error) override {
    fail(ErrorCode::corrupt_file, "{}: {}", name_, json_problem(error));
  }

 private:
  enum class Section : uint8_t { kept, skipped, vocabulary, merges, added };

  template <typename... Args>
  [[noreturn]] void corrupt(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::corrupt_file, "{}: {}", name_,
         fmt::format(format, std::forward<Args>(args)...));
  }

  // Returns the number of open objects and arrays in the section.
  int section_depth() const { return depth_ - section_begin_; }

  void begin_section(Section section) {
    section_ = section;
    section_begin_ = depth_;
  }

  void begin_root_field(const std::string& field) {
    if (field == "added_tokens") {
      begin_section(Section::added);
    } else if (std::find(kKept.begin(), kKept.end(), field) == kKept.end()) {
      begin_section(Section::skipped);
    }
  }

  void begin_model_field(const std::string& field) {
    if (field == "vocab") {
      document_.has_vocabulary = true;
      begin_section(Section::vocabulary);
    } else if (field == "merges") {
      document_.merges.emplace();
      begin_section(Section::merges);
    }
  }

  void open() {
    if (++depth_ > kMaxDepth) corrupt("nested deeper than {} levels", kMaxDepth);
  }

  bool close() {
    --depth_;
    return ended();
  }

  // Ends a value, and the section unless the value is nested in another value of the section.
  bool ended() {
    if (section_ != Section::kept && depth_ == section_begin_) section_ = Section::kept;
    return true;
  }

  void count_value() {
    if (++values_ > kMaxValues) {
      corrupt("more than {} values outside of vocabulary, merges and added tokens", kMaxValues);
    }
  }

  json* keep(json value) {
    count_value();
    if (open_values_.empty()) corrupt("is {}, must be an object", json_shown(value));
    json& parent = *open_values_.back();
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    return &(parent[key_] = std::move(value));
  }

  // Handles a value other than a string.
  bool scalar(json value) {
    switch (section_) {
      case Section::vocabulary:
        vocabulary_number(value);
        break;
      case Section::merges:
        wrong_merge(json_shown(value));
      case Section::added:
        added_field(value);
        break;
      case Section::kept:
        keep(std::move(value));
        break;
      case Section::skipped:
        break;
    }
    return ended();
  }

  [[noreturn]] void wrong_vocabulary(std::string_view what) const {
    if (section_depth() == 0) {
      corrupt("model.vocab is {}, must be an object of ids or an array of texts and scores", what);
    }
    if (document_.is_unigram) {
      corrupt("model.vocab[{}] has {}, must be a text and a score", document_.scores.size(), what);
    }
    corrupt("model.vocab.{} is {}, must be an integer from 0 to {}", clipped(key_), what,
            kLastToken);
  }

  void vocabulary_text(std::string& text) {
    if (section_depth() != 2 || entry_text_) wrong_vocabulary(quote(text));
    entry_text_ = std::move(text);
  }

  void vocabulary_number(const json& value) {
    if (document_.is_unigram) {
      if (section_depth() != 2 || !entry_text_ || entry_score_ || !value.is_number()) {
        wrong_vocabulary(json_shown(value));
      }
      entry_score_ = value.get<double>();
      return;
    }
    const bool fits = section_depth() == 1 && value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= kLastToken) &&
                      value.get<int64_t>() >= 0 && value.get<int64_t>() <= kLastToken;
    if (!fits) wrong_vocabulary(json_shown(value));
    const auto id = value.get<int32_t>();
    Vocabulary& vocabulary = document_.vocabulary;
    if (key_.empty()) corrupt("model.vocab has an empty token");
    if (vocabulary.find(key_) != Vocabulary::kNone) {
      corrupt("model.vocab: key {} is there twice", quote(key_));
    }
    if (vocabulary.has(id)) {
      corrupt("model.vocab: id {} is used by {} and {}", id, quote(vocabulary.text(id)),
              quote(key_));
    }
    vocabulary.add(key_, id);
  }

  void end_unigram_entry() {
    if (!entry_text_ || !entry_score_ || !std::isfinite(*entry_score_)) {
      wrong_vocabulary("something else");
    }
    if (document_.scores.size() == kMaxTokens) {
      corrupt("model.vocab has more than {} tokens", kMaxTokens);
    }
    document_.vocabulary.add(*entry_text_, static_cast<int32_t>(document_.scores.size()));
    document_.scores.push_back(*entry_score_);
  }

  [[noreturn]] void wrong_merge(std::string_view what) const {
    if (section_depth() == 0) corrupt("model.merges is {}, must be an array", what);
    corrupt("model.merges[{}] is {}, must be two tokens", document_.merges->size(), what);
  }

  // Handles "a b", or one element of ["a", "b"].
  void merge_text(std::string& text) {
    if (section_depth() == 2) {
      if (pair_.size() == 2) wrong_merge("an array of more than 2");
      pair_.push_back(std::move(text));
      return;
    }
    const size_t space = text.find(' ');
    if (section_depth() != 1 || space == text.npos || text.find(' ', space + 1) != text.npos) {
      // Older files begin with a comment.
      if (section_depth() == 1 && text.starts_with("#version")) return;
      wrong_merge(quote(text));
    }
    document_.merges->add(std::string_view(text).substr(0, space),
                          std::string_view(text).substr(space + 1));
  }

  void added_field(const json& value) {
    if (section_depth() == 0 && value.is_null()) return;
    const size_t index = document_.added.size();
    if (section_depth() < 2) {
      corrupt("added_tokens[{}] is {}, must be an object", index, json_shown(value));
    }
    if (section_depth() > 2) return;  // inside an ignored field
    if (key_ == "id") {
      const bool fits = value.is_number_unsigned() && value.get<uint64_t>() <= kLastToken;
      if (!fits) {
        corrupt("added_tokens[{}].id is {}, must be an integer from 0 to {}", index,
                json_shown(value), kLastToken);
      }
      added_id_ = value.get<int32_t>();
      return;
    }
    bool* flag = key_ == "special"       ? &added_.special
                 : key_ == "single_word" ? &added_.single_word
                 : key_ == "lstrip"      ? &added_.lstrip
                 : key_ == "rstrip"      ? &added_.rstrip
                                         : nullptr;
    if (value.is_null() || (flag == nullptr && key_ != "normalized")) return;
    if (!value.is_boolean()) {
      corrupt("added_tokens[{}].{} is {}, must be true or false", index, key_, json_shown(value));
    }
    if (flag != nullptr) {
      *flag = value.get<bool>();
    } else {
      added_normalized_ = value.get<bool>();
    }
  }

  void end_added() {
    const size_t index = document_.added.size();
    if (!added_id_) corrupt("added_tokens[{}].id is missing", index);
    added_.id = *added_id_;
    if (added_.content.empty() || added_.content.size() > kMaxAddedBytes) {
      corrupt("added token {} has {} bytes, must have 1 to {}", added_.id, added_.content.size(),
              kMaxAddedBytes);
    }
    added_.normalized = added_normalized_.value_or(!added_.special);
    document_.added.push_back(std::move(added_));
  }

  std::string_view name_;
  TokenizerDocument& document_;
  std::shared_ptr<json> root_ = make_json_document();
  std::vector<json*> open_values_;           // open values of root_
  std::vector<std::set<std::string>> seen_;  // keys of open objects that are kept
  size_t values_ = 0;
  int depth_ = 0;
  Section section_ = Section::kept;
  int section_begin_ = 0;  // depth_ at the begin of the section
  std::string top_key_, key_;
  std::optional<std::string> entry_text_;
  std::optional<double> entry_score_;
  std::vector<std::string> pair_;
  AddedToken added_;
  std::optional<bool> added_normalized_;
  std::optional<int32_t> added_id_;
};

}  // namespace

TokenizerDocument parse_tokenizer_document(std::string_view text, std::string_view name) {
  check_json_text(text, name, kMaxDocumentBytes);
  TokenizerDocument document;
  Handler handler(name, document);
  json::sax_parse(text.begin(), text.end(), &handler);
  document.root = JsonObject::of(handler.document(), name);
  return document;
}

}  // namespace fovea
