// SPDX-License-Identifier: Apache-2.0
#include "model/json.h"

#include <utility>
#include <vector>

#include "core/check.h"

namespace fovea {
namespace {

using nlohmann::json;

// Frees a document from the inside out. The destructor of a nested json allocates a list of its
// members and would terminate the process if memory runs out.
void dismantle(json& value) {
  if (!value.is_structured()) return;
  for (json& part : value) dismantle(part);
  value.clear();
}

struct Document {
  json root;

  Document() = default;
  ~Document() { dismantle(root); }
  Document(const Document&) = delete;
  Document& operator=(const Document&) = delete;
};

// Builds the document from the parser's events, and refuses deep nesting and repeated keys. (The
// parser's own callbacks search a whole array or object at the end of each element.)
class DocumentBuilder {
 public:
  DocumentBuilder(json& document, std::string_view name, int max_depth)
      : document_(document), name_(name), max_depth_(max_depth) {}

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(json::number_integer_t value) { return put(value); }
  bool number_unsigned(json::number_unsigned_t value) { return put(value); }
  bool number_float(json::number_float_t value, const std::string&) { return put(value); }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(json::binary_t& value) { return put(std::move(value)); }
  bool start_object(size_t) { return open(json::object()); }
  bool start_array(size_t) { return open(json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& name) {
    auto& object = open_.back()->get_ref<json::object_t&>();
    const auto [place, is_new] = object.emplace(std::move(name), nullptr);
    if (!is_new) {
      fail(ErrorCode::corrupt_file, "{}: key {} is there twice in one object", name_,
           quote(place->first));
    }
    member_ = &place->second;
    return true;
  }

  bool parse_error(size_t, const std::string&, const json::exception& error) {
    fail(ErrorCode::corrupt_file, "{}: {}", name_, json_problem(error));
  }

 private:
  json* put(json&& value, json::array_t* array) {
    if (array != nullptr) return &array->emplace_back(std::move(value));
    json* const place = open_.empty() ? &document_ : std::exchange(member_, nullptr);
    *place = std::move(value);
    return place;
  }

  json::array_t* open_array() {
    return open_.empty() ? nullptr : open_.back()->get_ptr<json::array_t*>();
  }

  bool put(json&& value) {
    put(std::move(value), open_array());
    return true;
  }

  bool open(json&& empty) {
    if (open_.size() >= static_cast<size_t>(max_depth_)) {
      fail(ErrorCode::corrupt_file, "{}: nested deeper than {} levels", name_, max_depth_);
    }
    open_.push_back(put(std::move(empty), open_array()));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  json& document_;
  std::string_view name_;
  int max_depth_;
  std::vector<json*> open_;  // objects and arrays, from the outermost to the current one
  json* member_ = nullptr;   // value of the last key in the current object
};

}  // namespace

void check_json_text(std::string_view text, std::string_view name, size_t max_bytes) {
  if (text.size() > max_bytes) {
    fail(ErrorCode::corrupt_file, "{}: {} bytes of JSON, the limit is {}", name, text.size(),
         max_bytes);
  }
  // The parser would treat a NUL as the end of the text.
  if (const size_t at = text.find('\0'); at != text.npos) {
    fail(ErrorCode::corrupt_file, "{}: byte {} is NUL, which JSON does not contain", name, at);
  }
}

std::shared_ptr<const json> parse_json(std::string_view text, std::string_view name,
                                       JsonLimits limits) {
  check_json_text(text, name, limits.bytes);
  std::shared_ptr<json> document = make_json_document();
  DocumentBuilder builder(*document, name, limits.depth);
  json::sax_parse(text.begin(), text.end(), &builder);
  return document;
}

std::shared_ptr<json> make_json_document() {
  const auto document = std::make_shared<Document>();
  return {document, &document->root};
}

std::string json_problem(const nlohmann::json::exception& error) {
  std::string_view what = error.what();
  // Turns "[json.exception.parse_error.101] parse error at line 1, column 2: ..." into its second
  // half.
  if (const size_t end = what.find("] "); end != what.npos) what.remove_prefix(end + 2);
  return clipped(what);
}

std::string json_shown(const nlohmann::json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return fmt::format("an array of {}", value.size());
  return clipped(value.dump(-1, ' ', false, json::error_handler_t::replace));
}

}  // namespace fovea
