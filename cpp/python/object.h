// The shape of every type of this module: a Python object that owns one C++ state.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <type_traits>

#include "python/errors.h"

namespace torchreplay::py {

template <class State>
struct Object {
  PyObject_HEAD;
  State* state;
};

// The state behind `self`, or an error when __init__ has not run (or failed).
template <class State>
State& state_of(PyObject* self) {
  State* s = reinterpret_cast<Object<State>*>(self)->state;
  if (!s) throw std::runtime_error("the object is not initialised");
  return *s;
}

template <class State>
void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Object<State>*>(self)->state;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

// Takes the state over, for the first __init__: another thread may be using that of an earlier one.
template <class State>
void install(PyObject* self, State* state) {
  std::unique_ptr<State> owned(state);
  auto*& slot = reinterpret_cast<Object<State>*>(self)->state;
  if (slot) throw std::runtime_error("the object is initialised already");
  slot = owned.release();
}

inline int as_status(PyObject* result) {
  Py_XDECREF(result);
  return result ? 0 : -1;
}

// Arguments of METH_FASTCALL methods.
inline void expect_args(const char* method, Py_ssize_t given, Py_ssize_t expected) {
  if (given == expected) return;
  PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments, got %zd", method, expected, given);
  throw PythonError{};
}

inline int64_t as_int(PyObject* o) {
  const long long v = PyLong_AsLongLong(o);
  if (v == -1 && PyErr_Occurred()) throw PythonError{};
  return v;
}

// Throws std::invalid_argument where an int does not hold it.
inline int as_count(PyObject* o) {
  const int64_t v = as_int(o);
  if (v < 0 || v > std::numeric_limits<int>::max())
    throw std::invalid_argument("got " + std::to_string(v) + ", expected 0 to " +
                                std::to_string(std::numeric_limits<int>::max()));
  return static_cast<int>(v);
}

inline uint64_t as_uint(PyObject* o) {
  const unsigned long long v = PyLong_AsUnsignedLongLong(o);
  if (v == static_cast<unsigned long long>(-1) && PyErr_Occurred()) throw PythonError{};
  return v;
}

inline double as_double(PyObject* o) {
  const double v = PyFloat_AsDouble(o);
  if (v == -1 && PyErr_Occurred()) throw PythonError{};
  return v;
}

// What a method returns to Python: None for nothing, a new reference as it is.
template <class Result>
PyObject* to_python(const Result& result) {
  if constexpr (std::is_same_v<Result, PyObject*>)
    return result;
  else if constexpr (std::is_same_v<Result, bool>)
    return PyBool_FromLong(result);
  else if constexpr (std::is_floating_point_v<Result>)
    return checked(PyFloat_FromDouble(result));
  else if constexpr (std::is_signed_v<Result>)
    return checked(PyLong_FromLongLong(result));
  else if constexpr (std::is_unsigned_v<Result>)
    return checked(PyLong_FromUnsignedLongLong(result));
  else
    return checked(PyUnicode_FromStringAndSize(result.data(), static_cast<Py_ssize_t>(result.size())));
}

// A method: what `body` makes of the state behind `self`.
template <class State, class Body>
PyObject* method(PyObject* self, Body&& body) {
  return guarded([&] {
    State& state = state_of<State>(self);
    if constexpr (std::is_void_v<decltype(body(state))>) {
      body(state);
      return Py_NewRef(Py_None);
    } else {
      return to_python(body(state));
    }
  });
}

// An attribute, and a method without arguments.
template <class State, auto body>
PyObject* attribute(PyObject* self, void*) {
  return method<State>(self, body);
}
template <class State, auto body>
PyObject* plain_method(PyObject* self, PyObject*) {
  return method<State>(self, body);
}

// The entry of a method that is called with an array of arguments.
inline PyCFunction fast(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(f));
}
inline PyCFunction fast(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(f));
}

template <class State>
PyType_Spec type_spec(const char* name, PyType_Slot* slots) {
  return {name, sizeof(Object<State>), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
}

}  // namespace torchreplay::py
