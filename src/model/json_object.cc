// SPDX-License-Identifier: Apache-2.0
#include "model/json_object.h"

#include <utility>

#include "core/check.h"
#include "core/mapped_file.h"
#include "model/json.h"

namespace fovea {

using nlohmann::json;

struct JsonObject::Node {
  std::shared_ptr<const json> document;
  const json* object = nullptr;  // points into the document
  std::string name;              // name of the file
  std::string path;              // path of this object: "" or "rope_parameters."

  const json* find(std::string_view field) const {
    const auto found = object->find(field);
    return found == object->end() || found->is_null() ? nullptr : &*found;
  }

  bool contains(std::string_view field) const { return object->find(field) != object->end(); }

  const json& need(std::string_view field) const {
    const json* value = find(field);
    if (value == nullptr) {
      fail(ErrorCode::corrupt_file, "{}: {}{} is {}", name, path, clipped(field),
           contains(field) ? "null" : "missing");
    }
    return *value;
  }

  [[noreturn]] void refuse(std::string_view field, const json& value,
                           std::string_view wanted) const {
    fail(ErrorCode::corrupt_file, "{}: {}{} is {}, must be {}", name, path, clipped(field),
         json_shown(value), wanted);
  }

  int64_t integer(std::string_view field, const json& value, int64_t low, int64_t high) const {
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX);
    if (!fits || value.get<int64_t>() < low || value.get<int64_t>() > high) {
      refuse(field, value, fmt::format("an integer from {} to {}", low, high));
    }
    return value.get<int64_t>();
  }

  double number(std::string_view field, const json& value, double low, double high) const {
    const double found = value.is_number() ? value.get<double>() : low - 1;
    if (!(found >= low && found <= high)) {
      refuse(field, value, fmt::format("a number from {} to {}", low, high));
    }
    return found;
  }

  const std::string& text(std::string_view field, const json& value) const {
    if (!value.is_string()) refuse(field, value, "a string");
    return value.get_ref<const std::string&>();
  }

  const json& array(std::string_view field) const {
    const json& value = need(field);
    if (!value.is_array()) refuse(field, value, "an array");
    return value;
  }
};

JsonObject JsonObject::open(const std::string& path) {
  const MappedFile file(path);
  return parse(file.text(), path);
}

JsonObject JsonObject::parse(std::string_view text, std::string_view name) {
  return parse(text, name, JsonLimits{});
}

JsonObject JsonObject::parse(std::string_view text, std::string_view name,
                             const JsonLimits& limits) {
  return of(parse_json(text, printable(name), limits), name);
}

JsonObject JsonObject::of(std::shared_ptr<const json> document, std::string_view name) {
  const std::string shown_name = printable(name);
  if (!document->is_object()) {
    fail(ErrorCode::corrupt_file, "{}: is {}, must be an object", shown_name,
         json_shown(*document));
  }
  const json* object = document.get();
  JsonObject config;
  config.node_ = std::make_shared<Node>(Node{std::move(document), object, shown_name, ""});
  return config;
}

void JsonObject::refuse(std::string_view field, std::string_view wanted) const {
  if (node_->contains(field)) node_->refuse(field, *node_->object->find(field), wanted);
  fail(ErrorCode::corrupt_file, "{}: {}{} is missing, must be {}", node_->name, node_->path,
       clipped(field), wanted);
}

bool JsonObject::has(std::string_view field) const { return node_->find(field) != nullptr; }

bool JsonObject::contains(std::string_view field) const { return node_->contains(field); }

bool JsonObject::is_object(std::string_view field) const {
  const json* value = node_->find(field);
  return value != nullptr && value->is_object();
}

int64_t JsonObject::integer(std::string_view field, int64_t low, int64_t high) const {
  return node_->integer(field, node_->need(field), low, high);
}

int64_t JsonObject::integer_or(std::string_view field, int64_t fallback, int64_t low,
                               int64_t high) const {
  return has(field) ? integer(field, low, high) : fallback;
}

double JsonObject::number(std::string_view field, double low, double high) const {
  return node_->number(field, node_->need(field), low, high);
}

double JsonObject::number_or(std::string_view field, double fallback, double low,
                             double high) const {
  return has(field) ? number(field, low, high) : fallback;
}

bool JsonObject::boolean_or(std::string_view field, bool fallback) const {
  const json* value = node_->find(field);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) node_->refuse(field, *value, "true or false");
  return value->get<bool>();
}

std::string JsonObject::text(std::string_view field) const {
  return node_->text(field, node_->need(field));
}

std::string JsonObject::text_or(std::string_view field, std::string_view fallback) const {
  return has(field) ? text(field) : std::string(fallback);
}

std::vector<std::string> JsonObject::texts(std::string_view field) const {
  std::vector<std::string> values;
  for (const json& item : node_->array(field)) {
    values.push_back(node_->text(fmt::format("{}[{}]", field, values.size()), item));
  }
  return values;
}

std::vector<int64_t> JsonObject::integers(std::string_view field, int64_t low, int64_t high) const {
  std::vector<int64_t> values;
  for (const json& item : node_->array(field)) {
    values.push_back(node_->integer(fmt::format("{}[{}]", field, values.size()), item, low, high));
  }
  return values;
}

std::vector<double> JsonObject::numbers(std::string_view field, double low, double high) const {
  std::vector<double> values;
  for (const json& item : node_->array(field)) {
    values.push_back(node_->number(fmt::format("{}[{}]", field, values.size()), item, low, high));
  }
  return values;
}

JsonObject JsonObject::child(const json& object, std::string_view field) const {
  if (!object.is_object()) node_->refuse(field, object, "an object");
  JsonObject config;
  config.node_ = std::make_shared<Node>(Node{node_->document, &object, node_->name,
                                             fmt::format("{}{}.", node_->path, clipped(field))});
  return config;
}

JsonObject JsonObject::object(std::string_view field) const {
  return child(node_->need(field), field);
}

std::vector<JsonObject> JsonObject::objects(std::string_view field) const {
  std::vector<JsonObject> objects;
  for (const json& item : node_->array(field)) {
    objects.push_back(child(item, fmt::format("{}[{}]", field, objects.size())));
  }
  return objects;
}

std::vector<std::string> JsonObject::fields() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : node_->object->items()) names.push_back(name);
  return names;
}

const json& JsonObject::value(std::string_view field) const { return node_->need(field); }

std::vector<int64_t> JsonObject::integer_or_list(std::string_view field, int64_t low,
                                                 int64_t high) const {
  if (node_->need(field).is_array()) return integers(field, low, high);
  return {integer(field, low, high)};
}

}  // namespace fovea
