// SPDX-License-Identifier: Apache-2.0
// The values of a chat template: those of Python that templates can make. All of them but
// namespaces are immutable, as in a sandbox.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace fovea::jinja {

class Dict;
class Value;
struct Function;
struct Iterator;
struct Loop;
struct Namespace;

using List = std::vector<Value>;

// A failure of a template. Template adds its name and line.
struct Failure {
  std::string message;
};

class Value {
 public:
  // Containers nest up to this depth. A function, a loop or a namespace counts as half of it, so
  // that none can be part of a namespace and outlive its scope.
  static constexpr int kMaxDepth = 200;

  struct Undefined {
    std::string name;  // for messages
  };
  struct None {};
  struct Tuple {
    std::shared_ptr<const List> items;
  };
  using Text = std::shared_ptr<const std::string>;

  Value() : data_(None{}) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::string value);
  Value(std::string_view value) : Value(std::string(value)) {}
  Value(const char* value) : Value(std::string(value)) {}
  Value(List items);
  Value(Dict dict);
  Value(std::shared_ptr<Iterator> items);
  Value(std::shared_ptr<const Function> function)
      : data_(std::move(function)), depth_(kMaxDepth / 2) {}
  Value(std::shared_ptr<Loop> loop) : data_(std::move(loop)), depth_(kMaxDepth / 2) {}
  Value(std::shared_ptr<Namespace> space) : data_(std::move(space)), depth_(kMaxDepth / 2) {}
  static Value tuple(List items);
  static Value undefined(std::string name) {
    Value value;
    value.data_ = std::make_shared<const Undefined>(Undefined{std::move(name)});
    return value;
  }

  bool is_undefined() const { return holds<std::shared_ptr<const Undefined>>(); }
  bool is_none() const { return holds<None>(); }
  bool is_bool() const { return holds<bool>(); }
  bool is_integer() const { return holds<int64_t>(); }
  bool is_float() const { return holds<double>(); }
  bool is_number() const { return is_bool() || is_integer() || is_float(); }
  bool is_text() const { return holds<Text>(); }
  bool is_dict() const { return holds<std::shared_ptr<const Dict>>(); }
  bool is_tuple() const { return holds<Tuple>(); }
  bool is_list() const { return holds<std::shared_ptr<const List>>(); }

  // Return null if the value has another type; items() serves lists and tuples.
  const std::string* text() const;
  const List* items() const;
  const Dict* dict() const;
  const std::shared_ptr<Iterator>* iterator() const { return get<std::shared_ptr<Iterator>>(); }
  const std::shared_ptr<const Function>* function() const {
    return get<std::shared_ptr<const Function>>();
  }
  const std::shared_ptr<Loop>* loop() const { return get<std::shared_ptr<Loop>>(); }
  const std::shared_ptr<Namespace>* space() const { return get<std::shared_ptr<Namespace>>(); }
  const Undefined* unknown() const;

  bool truth() const;
  // Returns a number as an integer; throws Failure for other types.
  int64_t integer() const;
  double number() const;
  std::string str() const;              // str(value)
  std::string repr() const;             // repr(value)
  const char* type_name() const;        // "str", "dict", ...
  int depth() const { return depth_; }  // levels of containers, 0 for plain values
  bool same_type(const Value& other) const { return data_.index() == other.data_.index(); }

 private:
  template <typename T>
  bool holds() const {
    return std::holds_alternative<T>(data_);
  }
  template <typename T>
  const T* get() const {
    return std::get_if<T>(&data_);
  }

  std::variant<None, bool, int64_t, double, Text, std::shared_ptr<const List>, Tuple,
               std::shared_ptr<const Dict>, std::shared_ptr<const Undefined>,
               std::shared_ptr<Iterator>, std::shared_ptr<const Function>, std::shared_ptr<Loop>,
               std::shared_ptr<Namespace>>
      data_;
  int depth_ = 0;
};

// Keeps the order of insertion.
class Dict {
 public:
  using Entry = std::pair<Value, Value>;

  void set(Value key, Value value);  // throws Failure for a key that Python cannot hash
  const Value* find(const Value& key) const;
  const Value* find_text(std::string_view key) const;
  const std::vector<Entry>& entries() const { return entries_; }
  size_t size() const { return entries_.size(); }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string_view, size_t> texts_;  // positions of keys that are texts
};

// A generator, which can be read once, or a view of a dict.
struct Iterator {
  List items;
  std::string name;      // "generator", "dict_keys"
  bool is_view = false;  // can be read any number of times
};

struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;

  const Value* find(std::string_view name) const;
  void set(std::string_view name, Value value);  // throws Failure for functions and namespaces
};

bool equal(const Value& left, const Value& right);
// Returns a negative number, 0 or a positive one. Throws Failure if Python cannot order the types;
// `sign` is the operator for the message.
int compare(const Value& left, const Value& right, std::string_view sign = "<");

}  // namespace fovea::jinja
