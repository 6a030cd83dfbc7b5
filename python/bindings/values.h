// SPDX-License-Identifier: Apache-2.0
// Conversions between Python objects and fields of options and specs. Every `*_from` throws
// Error{invalid_argument} that begins with the field's name.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/check.h"
#include "python/bindings/enums.h"

namespace fovea::python {

namespace nb = nanobind;

std::string type_text(nb::handle object);   // "a list", "None", "an object of type Foo"
std::string value_text(nb::handle object);  // the object's repr(), cut to 60 characters

// Reads an integer in [min, max].
int64_t signed_from(nb::handle object, std::string_view name, int64_t min, int64_t max);
uint64_t unsigned_from(nb::handle object, std::string_view name);
double number_from(nb::handle object, std::string_view name);
bool bool_from(nb::handle object, std::string_view name);
std::string string_from(nb::handle object, std::string_view name);
nb::object float_object(float value);  // reads as the shortest decimal that rounds to `value`

template <typename Integer>
Integer integer_from(nb::handle object, std::string_view name) {
  if constexpr (std::is_same_v<Integer, uint64_t>) {
    return unsigned_from(object, name);
  } else {
    return static_cast<Integer>(signed_from(object, name, std::numeric_limits<Integer>::min(),
                                            std::numeric_limits<Integer>::max()));
  }
}

inline size_t mix(size_t seed, size_t value) {
  return seed ^ (value + 0x9e3779b97f4a7c15 + (seed << 6) + (seed >> 2));
}

template <typename T>
struct is_optional : std::false_type {};
template <typename T>
struct is_optional<std::optional<T>> : std::true_type {};
template <typename T>
struct is_vector : std::false_type {};
template <typename T>
struct is_vector<std::vector<T>> : std::true_type {};

template <typename T>
T value_from(nb::handle object, std::string_view name) {
  if constexpr (is_optional<T>::value) {
    return value_from<typename T::value_type>(object, name);
  } else if constexpr (is_vector<T>::value) {
    check_argument(PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()),
                   "{} is {}, must be a list", name, type_text(object));
    T values;
    for (Py_ssize_t i = 0, size = PySequence_Size(object.ptr()); i < size; ++i) {
      const nb::object item = nb::steal(PySequence_GetItem(object.ptr(), i));
      values.push_back(value_from<typename T::value_type>(item, fmt::format("{}[{}]", name, i)));
    }
    return values;
  } else if constexpr (std::is_same_v<T, bool>) {
    return bool_from(object, name);
  } else if constexpr (std::is_integral_v<T>) {
    return integer_from<T>(object, name);
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(number_from(object, name));
  } else if constexpr (std::is_same_v<T, std::string>) {
    return string_from(object, name);
  } else if constexpr (std::is_enum_v<T>) {
    return enum_from<T>(object, name);
  } else {
    const T* value = nullptr;
    check_argument(nb::try_cast(object, value) && value != nullptr, "{} is {}, must be a {}", name,
                   type_text(object), nb::type_name(nb::type<T>()).c_str());
    return *value;
  }
}

template <typename T>
nb::object value_to(const T& value) {
  if constexpr (is_optional<T>::value) {
    return value ? value_to(*value) : nb::none();
  } else if constexpr (is_vector<T>::value) {
    nb::list list;
    for (const auto& item : value) list.append(value_to(item));
    return list;
  } else if constexpr (std::is_same_v<T, float>) {
    return float_object(value);
  } else {
    return nb::cast(value);
  }
}

template <typename T>
struct Field {
  const char* name;
  void (*set)(T&, nb::handle object, const char* name);
  nb::object (*get)(const T&);
  size_t (*hash)(const T&);
};

// Returns the fields of a value type, in the order of its declaration.
template <typename T>
std::span<const Field<T>> fields_of();

template <typename T>
size_t hash_of(const T& value) {
  if constexpr (is_optional<T>::value) {
    return value ? hash_of(*value) : 1;
  } else if constexpr (is_vector<T>::value) {
    size_t seed = value.size();
    for (const auto& item : value) seed = mix(seed, hash_of(item));
    return seed;
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<size_t>(value);
  } else if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    return std::hash<T>{}(value);
  } else {
    size_t seed = 0;
    for (const Field<T>& field : fields_of<T>()) seed = mix(seed, field.hash(value));
    return seed;
  }
}

template <auto kMember>
struct MemberOf;
template <typename Class, typename Type, Type Class::*kMember>
struct MemberOf<kMember> {
  using Owner = Class;
  using Value = Type;
};

// Describes a member: field<&AttentionSpec::window>("window").
template <auto kMember>
constexpr auto field(const char* name) {
  using Owner = typename MemberOf<kMember>::Owner;
  using Value = typename MemberOf<kMember>::Value;
  return Field<Owner>{name,
                      [](Owner& owner, nb::handle object, const char* label) {
                        owner.*kMember = value_from<Value>(object, label);
                      },
                      [](const Owner& owner) { return value_to(owner.*kMember); },
                      [](const Owner& owner) { return hash_of(owner.*kMember); }};
}

// Sets the fields that `arguments` names; None leaves a field as it is. Throws
// Error{invalid_argument} naming an argument that is no field of `type`.
template <typename T>
void set_fields(T& value, const nb::kwargs& arguments, std::string_view type) {
  for (const auto& [key, object] : arguments) {
    const std::string name = nb::cast<std::string>(key);
    const Field<T>* found = nullptr;
    std::string known;
    for (const Field<T>& field : fields_of<T>()) {
      if (name == field.name) found = &field;
      known += fmt::format("{}{}", known.empty() ? "" : ", ", field.name);
    }
    check_argument(found != nullptr, "{} has no field '{}', known: {}", type, name, known);
    if (!object.is_none()) found->set(value, object, found->name);
  }
}

}  // namespace fovea::python
