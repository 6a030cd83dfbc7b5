// SPDX-License-Identifier: Apache-2.0
// Makes a struct of options an immutable Python type: keyword-only constructor, properties,
// equality, hash, repr, replace() and pickling, all from fields_of().
#pragma once

#include "python/bindings/values.h"

namespace fovea::python {

// Completes fields whose default depends on others, after the constructor set those it was given.
template <typename T>
void complete(T&, const nb::kwargs&) {}

template <typename T>
T make_value(const nb::kwargs& arguments, std::string_view type) {
  T value;
  set_fields(value, arguments, type);
  complete(value, arguments);
  return value;
}

// Returns "Type(field=value)", without the fields that have their default.
template <typename T>
std::string repr_of(const T& value, const char* type) {
  const T defaults;
  std::string text;
  for (const Field<T>& field : fields_of<T>()) {
    nb::object mine = field.get(value);
    if (mine.equal(field.get(defaults))) continue;
    if (PyUnicode_Check(mine.ptr())) mine = nb::str(mine);  // an enumerator as plain text
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", field.name,
                        nb::cast<std::string>(nb::repr(mine)));
  }
  return fmt::format("{}({})", type, text);
}

template <typename T>
nb::tuple state_of(const T& value) {
  nb::list state;
  for (const Field<T>& field : fields_of<T>()) state.append(field.get(value));
  return nb::tuple(state);
}

template <typename T>
void set_state(T& value, const nb::tuple& state) {
  size_t i = 0;
  for (const Field<T>& field : fields_of<T>()) {
    const nb::object item = state[i++];
    if (!item.is_none()) field.set(value, item, field.name);
  }
}

template <typename T>
nb::class_<T> bind_value_type(nb::module_& module, const char* name, const char* signature,
                              const char* doc) {
  nb::class_<T> type(module, name, doc, nb::is_final());
  type.def(
      "__init__",
      [name](T* self, const nb::kwargs& arguments) {
        new (self) T(make_value<T>(arguments, name));
      },
      nb::sig(signature));
  for (const Field<T>& field : fields_of<T>()) {
    type.def_prop_ro(field.name, [get = field.get](const T& self) { return get(self); });
  }
  type.def("__eq__", [](const T& self, nb::handle other) -> nb::object {
    const T* value = nullptr;
    if (!nb::try_cast(other, value) || value == nullptr) return nb::borrow(Py_NotImplemented);
    return nb::bool_(self == *value);
  });
  type.def("__hash__", [](const T& self) {
    return static_cast<Py_ssize_t>(hash_of(self) >> 1);  // -1 would mean an error
  });
  type.def("__repr__", [name](const T& self) { return repr_of(self, name); });
  type.def(
      "replace",
      [name](const T& self, const nb::kwargs& arguments) {
        T changed = self;
        set_fields(changed, arguments, name);
        return changed;
      },
      "Returns a copy with the given fields changed.");
  type.def("__getstate__", [](const T& self) { return state_of(self); });
  type.def("__setstate__", [](T& self, const nb::tuple& state) {
    new (&self) T();
    set_state(self, state);
  });
  return type;
}

}  // namespace fovea::python
