// SPDX-License-Identifier: Apache-2.0
#include "python/bindings/values.h"

#include <cmath>
#include <cstdlib>

namespace fovea::python {
namespace {

constexpr size_t kMaxText = 60;

// Returns the object as a Python int; invalid if it is none. bool counts as an integer, as in
// Python.
nb::object index_of(nb::handle object) {
  nb::object index = nb::steal(PyNumber_Index(object.ptr()));
  if (!index.is_valid()) PyErr_Clear();
  return index;
}

}  // namespace

std::string type_text(nb::handle object) {
  if (object.is_none()) return "None";
  return fmt::format("of type {}", nb::cast<std::string>(nb::str(object.type().attr("__name__"))));
}

std::string value_text(nb::handle object) {
  std::string text = nb::cast<std::string>(nb::repr(object));
  if (text.size() > kMaxText) text = text.substr(0, kMaxText) + "...";
  return text;
}

int64_t signed_from(nb::handle object, std::string_view name, int64_t min, int64_t max) {
  const nb::object index = index_of(object);
  check_argument(index.is_valid(), "{} is {}, must be an integer", name, value_text(object));
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  check_argument(overflow == 0 && value >= min && value <= max, "{} is {}, must be in [{}, {}]",
                 name, value_text(object), min, max);
  return value;
}

uint64_t unsigned_from(nb::handle object, std::string_view name) {
  const nb::object index = index_of(object);
  check_argument(index.is_valid(), "{} is {}, must be an integer", name, value_text(object));
  const unsigned long long value = PyLong_AsUnsignedLongLong(index.ptr());
  const bool fits = PyErr_Occurred() == nullptr;
  if (!fits) PyErr_Clear();
  check_argument(fits, "{} is {}, must be in [0, {}]", name, value_text(object),
                 std::numeric_limits<uint64_t>::max());
  return value;
}

double number_from(nb::handle object, std::string_view name) {
  const double value = PyFloat_AsDouble(object.ptr());
  const bool fits = PyErr_Occurred() == nullptr;
  if (!fits) PyErr_Clear();
  check_argument(fits, "{} is {}, must be a number", name, value_text(object));
  return value;
}

bool bool_from(nb::handle object, std::string_view name) {
  if (object.ptr() == Py_True) return true;
  check_argument(object.ptr() == Py_False, "{} is {}, must be True or False", name,
                 value_text(object));
  return false;
}

std::string string_from(nb::handle object, std::string_view name) {
  check_argument(PyUnicode_Check(object.ptr()) != 0, "{} is {}, must be text", name,
                 value_text(object));
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) PyErr_Clear();  // lone surrogates
  check_argument(text != nullptr, "{} is {}, must be text that UTF-8 can express", name,
                 value_text(object));
  return {text, static_cast<size_t>(size)};
}

nb::object float_object(float value) {
  if (!std::isfinite(value)) return nb::float_(static_cast<double>(value));
  return nb::float_(std::strtod(fmt::format("{}", value).c_str(), nullptr));
}

}  // namespace fovea::python
