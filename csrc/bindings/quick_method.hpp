// QuickMethod: a method that pybind11 has bound, called without its dispatch where the arguments are plain.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace holmes {

// A Python value as a parameter, without conversions: `get` gives nothing where pybind11 has to decide. A parameter
// that has no PlainValue of its own takes None only. `kind`: what it takes, in words.
template <typename T>
struct PlainValue;

template <>
struct PlainValue<pybind11::object> {
  static constexpr const char* kind = "an object";
  static std::optional<pybind11::object> get(PyObject* value) {
    return pybind11::reinterpret_borrow<pybind11::object>(value);
  }
};

template <>
struct PlainValue<bool> {
  static constexpr const char* kind = "True or False";
  static std::optional<bool> get(PyObject* value) {
    return value == Py_True ? std::optional(true) : value == Py_False ? std::optional(false) : std::nullopt;
  }
};

template <>
struct PlainValue<std::int64_t> {
  static constexpr const char* kind = "a whole number of 64 bits";
  static std::optional<std::int64_t> get(PyObject* value) {
    if (!PyLong_CheckExact(value)) return std::nullopt;
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return overflow == 0 ? std::optional<std::int64_t>(number) : std::nullopt;
  }
};

template <>
struct PlainValue<int> {
  static constexpr const char* kind = "a whole number of 32 bits";
  static std::optional<int> get(PyObject* value) {
    const auto number = PlainValue<std::int64_t>::get(value);
    const bool fits =
        number && *number >= std::numeric_limits<int>::min() && *number <= std::numeric_limits<int>::max();
    return fits ? std::optional(static_cast<int>(*number)) : std::nullopt;
  }
};

template <>
struct PlainValue<double> {
  static constexpr const char* kind = "a number";
  static std::optional<double> get(PyObject* value) {
    return PyFloat_CheckExact(value) ? std::optional(PyFloat_AS_DOUBLE(value)) : std::nullopt;
  }
};

template <>
struct PlainValue<std::string> {
  static constexpr const char* kind = "text";
  static std::optional<std::string> get(PyObject* value) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_CheckExact(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
    if (text) return std::string(text, static_cast<std::size_t>(size));
    PyErr_Clear();
    return std::nullopt;
  }
};

template <typename T>
struct PlainValue<std::optional<T>> {
  static std::string kind_or_none() {
    if constexpr (requires { PlainValue<T>::kind; }) return PlainValue<T>::kind + std::string(" or None");
    return "what help() says, or None";
  }
  static std::optional<std::optional<T>> get(PyObject* value) {
    if (value == Py_None) return std::optional<T>();
    if constexpr (requires { PlainValue<T>::get(value); })
      if (auto plain = PlainValue<T>::get(value)) return std::optional<T>(std::move(*plain));
    return std::nullopt;
  }
};

// A list or tuple of numbers.
template <>
struct PlainValue<std::vector<std::int64_t>> {
  static constexpr const char* kind = "a list of whole numbers of 64 bits";
  static std::optional<std::vector<std::int64_t>> get(PyObject* value) {
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return std::nullopt;
    const auto size = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(value));
    std::vector<std::int64_t> numbers;
    numbers.reserve(size);
    for (std::size_t i = 0; i < size; ++i) {
      const auto number = PlainValue<std::int64_t>::get(PySequence_Fast_GET_ITEM(value, static_cast<Py_ssize_t>(i)));
      if (!number) return std::nullopt;
      numbers.push_back(*number);
    }
    return numbers;
  }
};

// A list or tuple of tuples.
template <typename... Ts>
struct PlainValue<std::vector<std::tuple<Ts...>>> {
  static constexpr const char* kind = "a list of tuples, as help() says";
  using Row = std::tuple<Ts...>;
  static std::optional<std::vector<Row>> get(PyObject* value) {
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return std::nullopt;
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(value);
    std::vector<Row> rows;
    rows.reserve(static_cast<std::size_t>(size));
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = PySequence_Fast_GET_ITEM(value, i);
      if (!PyTuple_CheckExact(item) || PyTuple_GET_SIZE(item) != sizeof...(Ts)) return std::nullopt;
      if (!append(rows, item, std::index_sequence_for<Ts...>())) return std::nullopt;
    }
    return rows;
  }

private:
  template <std::size_t... I>
  static bool append(std::vector<Row>& rows, PyObject* item, std::index_sequence<I...>) {
    std::tuple<std::optional<Ts>...> plain;
    const bool is_plain =
        ((std::get<I>(plain) = PlainValue<Ts>::get(PyTuple_GET_ITEM(item, static_cast<Py_ssize_t>(I)))).has_value() &&
         ...);
    if (is_plain) rows.emplace_back(std::move(*std::get<I>(plain))...);
    return is_plain;
  }
};

// `Self`: the class; `Function`: a lambda without captures (Self&, parameters...).
template <typename Self, typename Function, typename Signature = decltype(&Function::operator())>
class QuickMethod;

template <typename Self, typename Function, typename Result, typename... Parameters>
class QuickMethod<Self, Function, Result (Function::*)(Self&, Parameters...) const> {
public:
  // Puts itself before the method `name` of `type`, which is called for everything else: its conversions and its errors
  // hold. `extras`: what it was bound with, which names every parameter.
  template <typename... Extras>
  static void install(pybind11::class_<Self, std::shared_ptr<Self>>& type, const char* name, const Extras&... extras) {
    name_ = name;
    noted_ = 0;
    (note(extras), ...);
    bound_ = pybind11::object(type.attr(name)).release().ptr();
    type_ = reinterpret_cast<PyTypeObject*>(type.ptr());
    static PyMethodDef definition{};
    definition.ml_name = name;
    definition.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&call));
    definition.ml_flags = METH_FASTCALL | METH_KEYWORDS;
    // It lives as long as the method that is never let go of.
    definition.ml_doc = PyUnicode_AsUTF8(pybind11::object(type.attr(name).attr("__doc__")).release().ptr());
    type.attr(name) = pybind11::reinterpret_steal<pybind11::object>(PyDescr_NewMethod(type_, &definition));
  }

private:
  static constexpr std::size_t count = sizeof...(Parameters);
  using Values = std::tuple<std::optional<std::decay_t<Parameters>>...>;

  static void note(const pybind11::arg& parameter) { names_[noted_++] = PyUnicode_InternFromString(parameter.name); }
  static void note(const pybind11::arg_v& parameter) {
    defaults_[noted_] = pybind11::object(parameter.value).release().ptr();
    note(static_cast<const pybind11::arg&>(parameter));
  }
  static void note(const char* /*doc*/) {}

  // By parameter; null where none is given. False where that is not plain.
  static bool place(std::array<PyObject*, count>& placed, PyObject* const* given, Py_ssize_t positional,
                    PyObject* keywords) {
    if (positional > static_cast<Py_ssize_t>(count)) return false;
    placed = defaults_;
    for (Py_ssize_t i = 0; i < positional; ++i) placed[static_cast<std::size_t>(i)] = given[i];
    const Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* const keyword = PyTuple_GET_ITEM(keywords, i);
      auto at = static_cast<std::size_t>(positional);
      while (at < count && names_[at] != keyword) ++at;
      if (at == count) at = static_cast<std::size_t>(positional);  // one that was made while the program ran
      while (at < count && names_[at] != keyword && PyUnicode_Compare(names_[at], keyword) != 0) ++at;
      if (at == count) return false;
      placed[at] = given[positional + i];
    }
    for (PyObject* const value : placed)
      if (!value) return false;
    return true;
  }

  template <std::size_t... I>
  static PyObject* call_plain(Self& self, const std::array<PyObject*, count>& placed, bool& is_plain,
                              std::index_sequence<I...>) {
    Values values;
    is_plain = ((std::get<I>(values) = PlainValue<std::decay_t<Parameters>>::get(placed[I])).has_value() && ...);
    if (!is_plain) return nullptr;
    if constexpr (std::is_void_v<Result>) {
      Function{}(self, *std::get<I>(values)...);
      return pybind11::none().release().ptr();
    } else {
      return pybind11::object(Function{}(self, *std::get<I>(values)...)).release().ptr();
    }
  }

  static PyObject* call(PyObject* object, PyObject* const* given, Py_ssize_t positional, PyObject* keywords) {
    std::array<PyObject*, count> placed;
    if (Self* const self = plain_self(object); self && place(placed, given, positional, keywords)) {
      bool is_plain = true;
      try {
        PyObject* const result = call_plain(*self, placed, is_plain, std::index_sequence_for<Parameters...>());
        if (is_plain) return result;
      } catch (abi::__forced_unwind&) {  // Python ends a thread that asks for its lock once it has ended itself
        throw;
      } catch (pybind11::error_already_set& error) {
        error.restore();
        return nullptr;
      } catch (...) {
        pybind11::detail::try_translate_exceptions();
        return nullptr;
      }
    }
    if (is_empty(object)) {
      PyErr_Format(PyExc_TypeError, "this %s was never made; its class makes none", type_->tp_name);
      return nullptr;
    }
    if (const std::string wrong = wrong_name(given, positional, keywords); !wrong.empty()) {
      refuse(wrong);
      return nullptr;
    }
    const auto all = static_cast<std::size_t>(positional + (keywords ? PyTuple_GET_SIZE(keywords) : 0));
    std::vector<PyObject*> arguments{object};
    arguments.insert(arguments.end(), given, given + all);
    PyObject* const result =
        PyObject_Vectorcall(bound_, arguments.data(), static_cast<std::size_t>(positional) + 1, keywords);
    if (!result && PyErr_ExceptionMatches(PyExc_TypeError)) say_what_is_wrong(given, positional, keywords);
    return result;
  }

  static constexpr const char* refusal = "incompatible function arguments";
  static void refuse(const std::string& why) {
    PyErr_Format(PyExc_TypeError, "%s(): %s: %s", name_, refusal, why.c_str());
  }

  // In place of pybind11's list of all parameters and arguments.
  static void say_what_is_wrong(PyObject* const* given, Py_ssize_t positional, PyObject* keywords) {
    pybind11::error_already_set error;
    std::string what;
    try {
      std::array<PyObject*, count> placed;
      if (std::string(error.what()).find(refusal) != std::string::npos && place(placed, given, positional, keywords))
        what = wrong_value(placed, std::index_sequence_for<Parameters...>());
    } catch (const std::exception&) {  // it cannot be shown
    }
    if (what.empty()) return error.restore();
    refuse(what);
  }

  // Too many arguments, too few, or one of another name; else empty.
  static std::string wrong_name(PyObject* const* given, Py_ssize_t positional, PyObject* keywords) {
    std::string takes = "it takes";
    for (PyObject* const name : names_)
      takes += (name == names_.front() ? " " : ", ") + std::string(PyUnicode_AsUTF8(name));
    if (positional > static_cast<Py_ssize_t>(count)) return "there are too many; " + takes;
    const Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* const keyword = PyTuple_GET_ITEM(keywords, i);
      const auto at =
          std::ranges::find_if(names_, [&](PyObject* name) { return PyUnicode_Compare(name, keyword) == 0; });
      const std::string shown = pybind11::repr(keyword).template cast<std::string>();
      if (at == names_.end()) return "there is no " + shown + "; " + takes;
      if (at - names_.begin() < positional) return shown + " is given twice";
    }
    std::array<PyObject*, count> placed;
    if (place(placed, given, positional, keywords)) return "";
    const auto missing = std::ranges::find(placed, nullptr) - placed.begin();
    return PyUnicode_AsUTF8(names_[static_cast<std::size_t>(missing)]) + (" is missing; " + takes);
  }

  template <std::size_t... I>
  static std::string wrong_value(const std::array<PyObject*, count>& placed, std::index_sequence<I...>) {
    std::string wrong;
    [[maybe_unused]] const bool is_right =
        ((wrong = wrong_value<std::decay_t<Parameters>>(I, placed[I])).empty() && ...);
    return wrong;
  }

  // Empty where it can be converted.
  template <typename T>
  static std::string wrong_value(std::size_t at, PyObject* value) {
    if (pybind11::detail::make_caster<T>().load(value, true)) return "";
    PyErr_Clear();
    std::string kind;
    if constexpr (requires { PlainValue<T>::kind; })
      kind = PlainValue<T>::kind;
    else
      kind = PlainValue<T>::kind_or_none();
    if (defaults_[at] && defaults_[at] != Py_None)
      kind += ", as " + pybind11::repr(defaults_[at]).template cast<std::string>();
    constexpr std::size_t most_shown = 80;
    std::string shown = pybind11::repr(value).template cast<std::string>();
    if (shown.size() > most_shown || shown.find('\n') != std::string::npos) shown = "...";
    return PyUnicode_AsUTF8(names_[at]) + ("=" + shown) + " is of type " + Py_TYPE(value)->tp_name + "; give " + kind;
  }

  // Of an object of the class itself that is initialized.
  static Self* plain_self(PyObject* object) {
    if (Py_TYPE(object) != type_) return nullptr;
    const auto* const instance = reinterpret_cast<pybind11::detail::instance*>(object);
    return instance->simple_layout ? static_cast<Self*>(instance->simple_value_holder[0]) : nullptr;
  }

  // What __new__ alone gives.
  static bool is_empty(PyObject* object) {
    const auto* const instance = reinterpret_cast<pybind11::detail::instance*>(object);
    return Py_TYPE(object) == type_ && instance->simple_layout && !instance->simple_value_holder[0];
  }

  static inline std::array<PyObject*, count> names_{};
  static inline std::array<PyObject*, count> defaults_{};
  static inline std::size_t noted_ = 0;
  static inline const char* name_ = "";
  static inline PyObject* bound_ = nullptr;
  static inline PyTypeObject* type_ = nullptr;
};

// As type.def(name, function, extras...).
template <typename Self, typename Function, typename... Extras>
void def_quick(pybind11::class_<Self, std::shared_ptr<Self>>& type, const char* name, Function function,
               const Extras&... extras) {
  type.def(name, function, extras...);
  QuickMethod<Self, Function>::install(type, name, extras...);
}

}  // namespace holmes
