// SPDX-License-Identifier: Apache-2.0
#include "tokenizer/tokenizer_file.h"

#include <array>
#include <utility>

#include "core/check.h"
#include "model/config.h"
#include "model/json.h"
#include "tokenizer/nfc.h"
#include "tokenizer/utf8.h"

namespace fovea {
namespace {

using nlohmann::json;

constexpr JsonLimits kLimits = {.bytes = 128'000'000, .depth = 32};
constexpr int64_t kMaxTokens = 1 << 21;
constexpr size_t kMaxAddedBytes = 1024;
constexpr size_t kMaxStages = 32;

// The pattern of GPT-2, which ByteLevel has built in.
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Vocabularies of byte-level models write every byte as a printable character: most of Latin-1 as
// itself, the others as U+0100, U+0101, ... (Radford et al. 2019, the code of GPT-2).
class ByteAlphabet {
 public:
  ByteAlphabet() {
    byte_of_.fill(kNone);
    int next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
      byte_of_[printable ? byte : next++] = static_cast<int16_t>(byte);
    }
  }

  // The bytes a token stands for; nullopt when it has a character outside the alphabet.
  std::optional<std::string> bytes(std::string_view token) const {
    std::string out;
    while (!token.empty()) {
      const size_t length = next_utf8(token).bytes;
      const uint32_t point = code_point(token.substr(0, length));
      if (point >= byte_of_.size() || byte_of_[point] == kNone) return std::nullopt;
      out += static_cast<char>(byte_of_[point]);
      token.remove_prefix(length);
    }
    return out;
  }

 private:
  static constexpr int16_t kNone = -1;
  std::array<int16_t, 256 + 68> byte_of_ = {};  // by code point
};

class Reader {
 public:
  Reader(std::string_view text, std::string_view name)
      : name_(name), root_(Config::parse(text, name, kLimits)) {}

  TokenizerFile read() {
    for (const char* field : {"truncation", "padding"}) {
      if (root_.has(field)) refuse(fmt::format("{}", field));
    }
    const Config model = root_.object("model");
    read_vocabulary(model);
    read_merges(model);
    if (root_.has("normalizer")) read_normalizer(root_.object("normalizer"));
    read_added_tokens();
    if (!root_.has("pre_tokenizer")) refuse("no pre_tokenizer");
    read_pre_tokenizer(root_.object("pre_tokenizer"));
    if (!byte_level_) refuse("a pre_tokenizer without ByteLevel");
    if (!root_.has("decoder")) refuse("no decoder");
    read_decoder(root_.object("decoder"));
    if (root_.has("post_processor")) read_post_processor(root_.object("post_processor"));
    return std::move(file_);
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

  void set_token(int64_t id, std::string bytes) {
    if (file_.bytes.size() <= static_cast<size_t>(id)) file_.bytes.resize(id + 1);
    file_.bytes[id] = std::move(bytes);
  }

  void read_vocabulary(const Config& model) {
    if (model.text_or("type", "BPE") != "BPE") refuse("model type " + model.text("type"));
    for (const char* field : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (!model.text_or(field, "").empty()) refuse(fmt::format("model.{}", field));
    }
    if (model.boolean_or("byte_fallback", false)) refuse("model.byte_fallback");
    if (model.number_or("dropout", 0, 0, 1) != 0) refuse("model.dropout");
    file_.ignore_merges = model.boolean_or("ignore_merges", false);
    const Config vocab = model.object("vocab");
    for (const std::string& token : vocab.fields()) {
      const auto id = static_cast<int32_t>(vocab.integer(token, 0, kMaxTokens - 1));
      if (token.empty()) corrupt("model.vocab has an empty token");
      if (!vocabulary_.emplace(token, id).second || !vocabulary_ids_.emplace(id, token).second) {
        corrupt("model.vocab: id {} is used by '{}' and '{}'", id, clipped(vocabulary_ids_.at(id)),
                clipped(token));
      }
      std::optional<std::string> bytes = alphabet_.bytes(token);
      if (bytes) file_.ids.emplace(*bytes, id);
      set_token(id, bytes.value_or(token));
    }
    // So every text has tokens, and no unknown token is ever needed.
    for (int byte = 0; byte < 256; ++byte) {
      const auto found = file_.ids.find(std::string(1, static_cast<char>(byte)));
      if (found == file_.ids.end()) {
        refuse(fmt::format("a vocabulary without the byte 0x{:02X}", byte));
      }
      file_.merger.set_byte(static_cast<uint8_t>(byte), found->second);
    }
  }

  // "a b" or ["a", "b"]
  std::pair<std::string, std::string> merge_pair(const json& item, size_t rank) const {
    if (item.is_string()) {
      const auto& text = item.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space != text.npos && text.find(' ', space + 1) == text.npos) {
        return {text.substr(0, space), text.substr(space + 1)};
      }
    } else if (item.is_array() && item.size() == 2 && item[0].is_string() && item[1].is_string()) {
      return {item[0].get<std::string>(), item[1].get<std::string>()};
    }
    corrupt("model.merges[{}] is {}, must be two tokens", rank, json_shown(item));
  }

  void read_merges(const Config& model) {
    const json& merges = model.value("merges");
    if (!merges.is_array()) corrupt("model.merges is {}, must be an array", json_shown(merges));
    int32_t rank = 0;
    for (const json& item : merges) {
      const auto [left, right] = merge_pair(item, rank);
      const auto id = [&](const std::string& token) {
        const auto found = vocabulary_.find(token);
        if (found == vocabulary_.end()) {
          corrupt("model.merges[{}]: '{}' is not in the vocabulary", rank, clipped(token));
        }
        return found->second;
      };
      file_.merger.add_merge(id(left), id(right), rank, id(left + right));
      ++rank;
    }
  }

  void read_normalizer(const Config& normalizer) {
    const std::string type = normalizer.text("type");
    if (type == "Sequence") {
      for (const Config& item : normalizer.objects("normalizers")) read_normalizer(item);
    } else if (type != "NFC") {
      refuse("normalizer " + type);
    } else {
      file_.nfc = true;
    }
  }

  void read_added_tokens() {
    std::vector<Config> items;
    if (root_.has("added_tokens")) items = root_.objects("added_tokens");
    TokenIds seen;
    for (const Config& item : items) {
      AddedToken token;
      token.id = static_cast<int32_t>(item.integer("id", 0, kMaxTokens - 1));
      token.content = item.text("content");
      token.special = item.boolean_or("special", false);
      token.normalized = item.boolean_or("normalized", !token.special);
      token.lstrip = item.boolean_or("lstrip", false);
      token.rstrip = item.boolean_or("rstrip", false);
      const std::string shown = clipped(token.content);
      if (item.boolean_or("single_word", false)) refuse("single_word of added token " + shown);
      if (token.content.empty() || token.content.size() > kMaxAddedBytes) {
        corrupt("added token {} has {} bytes, must have 1 to {}", token.id, token.content.size(),
                kMaxAddedBytes);
      }
      if (!seen.emplace(token.content, token.id).second) {
        corrupt("added token '{}' is there twice", shown);
      }
      check_added_id(token);
      set_token(token.id, alphabet_.bytes(token.content).value_or(token.content));
      file_.special.resize(file_.bytes.size());
      file_.special[token.id] = token.special;
      if (token.normalized && file_.nfc) token.content = to_nfc(token.content);
      (token.normalized ? file_.normalized_added : file_.raw_added).add(token);
    }
    file_.special.resize(file_.bytes.size());
  }

  // An added token may be in the vocabulary too, under the same id.
  void check_added_id(const AddedToken& token) {
    const auto known = vocabulary_.find(token.content);
    if (known != vocabulary_.end()) {
      if (known->second == token.id) return;
      corrupt("added token '{}' has id {}, in the vocabulary it is {}", clipped(token.content),
              token.id, known->second);
    }
    const auto [other, is_new] = vocabulary_ids_.emplace(token.id, token.content);
    if (!is_new) {
      corrupt("id {} is used by '{}' and the added token '{}'", token.id, clipped(other->second),
              clipped(token.content));
    }
  }

  void add_stage(SplitStage stage) {
    if (byte_level_) refuse("a pre_tokenizer after ByteLevel");
    if (file_.stages.size() == kMaxStages) {
      corrupt("pre_tokenizer has more than {} steps", kMaxStages);
    }
    file_.stages.push_back(std::move(stage));
  }

  void read_pre_tokenizer(const Config& item) {
    const std::string type = item.text("type");
    SplitStage stage;
    if (type == "Sequence") {
      for (const Config& step : item.objects("pretokenizers")) read_pre_tokenizer(step);
    } else if (type == "ByteLevel") {
      stage.prefix_space = item.boolean_or("add_prefix_space", true);
      if (item.boolean_or("use_regex", true)) {
        stage.pattern = Pattern::from_regex(kGpt2Pattern, name_);
      }
      add_stage(std::move(stage));
      byte_level_ = true;
    } else if (type == "Digits") {
      const bool individual = item.boolean_or("individual_digits", false);
      stage.pattern = Pattern::from_regex(individual ? "\\p{N}" : "\\p{N}+", name_);
      add_stage(std::move(stage));
    } else if (type == "Split") {
      add_stage(split_stage(item));
    } else {
      refuse("pre_tokenizer " + type);
    }
  }

  SplitStage split_stage(const Config& item) const {
    SplitStage stage;
    const Config pattern = item.object("pattern");
    stage.pattern = pattern.has("Regex") ? Pattern::from_regex(pattern.text("Regex"), name_)
                                         : Pattern::from_literal(pattern.text("String"), name_);
    const std::string behavior = item.text("behavior");
    if (behavior == "Removed") {
      stage.keep_matches = item.boolean_or("invert", false);
      stage.keep_rests = !stage.keep_matches;
    } else if (behavior != "Isolated") {
      refuse("the behavior " + behavior + " of the pre_tokenizer Split");
    }
    return stage;
  }

  void read_decoder(const Config& decoder) {
    const std::string type = decoder.text("type");
    if (type == "ByteLevel") return;
    if (type != "Sequence") refuse("decoder " + type);
    // Fuse joins what ByteLevel has already joined.
    bool byte_level = false;
    for (const Config& step : decoder.objects("decoders")) {
      const std::string step_type = step.text("type");
      if (step_type == (byte_level ? "Fuse" : "ByteLevel")) {
        byte_level = true;
      } else {
        refuse("decoder " + step_type + " in a Sequence");
      }
    }
    if (!byte_level) refuse("a decoder without ByteLevel");
  }

  void read_post_processor(const Config& item) {
    const std::string type = item.text("type");
    if (type == "Sequence") {
      for (const Config& step : item.objects("processors")) read_post_processor(step);
    } else if (type == "TemplateProcessing") {
      read_template(item);
    } else if (type != "ByteLevel") {  // that one moves offsets only
      refuse("post_processor " + type);
    }
  }

  void read_template(const Config& item) {
    std::vector<int32_t> prefix, suffix;
    bool has_text = false;
    for (const Config& piece : item.objects("single")) {
      if (piece.has("Sequence")) {
        if (std::exchange(has_text, true) || piece.object("Sequence").text("id") != "A") {
          refuse("a post_processor that does not hold the text once");
        }
        continue;
      }
      const std::string id = piece.object("SpecialToken").text("id");
      const Config token = item.object("special_tokens").object(id);
      auto& side = has_text ? suffix : prefix;
      for (const int64_t value : token.integers("ids", 0, kMaxTokens - 1)) {
        if (!vocabulary_ids_.contains(static_cast<int32_t>(value))) {
          corrupt("post_processor adds '{}', whose id {} is no token", clipped(id), value);
        }
        side.push_back(static_cast<int32_t>(value));
      }
    }
    if (!has_text) refuse("a post_processor that does not hold the text once");
    file_.prefix.insert(file_.prefix.begin(), prefix.begin(), prefix.end());
    file_.suffix.insert(file_.suffix.end(), suffix.begin(), suffix.end());
  }

  std::string_view name_;
  Config root_;
  ByteAlphabet alphabet_;
  TokenIds vocabulary_;                                      // by the token as written
  std::unordered_map<int32_t, std::string> vocabulary_ids_;  // the reverse, with added tokens
  bool byte_level_ = false;                                  // its pre-tokenizer was read
  TokenizerFile file_;
};

}  // namespace

TokenizerFile read_tokenizer_file(std::string_view json, std::string_view name) {
  return Reader(json, name).read();
}

}  // namespace fovea
