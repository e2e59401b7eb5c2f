// Python errors from C++ exceptions, and how waits call the interpreter.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <stdexcept>
#include <system_error>

#include "checkpoint/snapshot.h"
#include "client/attachment.h"
#include "python/gil.h"
#include "segment/format.h"
#include "system/blocks.h"
#include "write/participants.h"

namespace torchreplay::py {

// An error is already set in the interpreter.
struct PythonError {};

// torchreplay.ReplayTimeout and torchreplay.Stopped; and report(text), which long waits call.
inline PyObject* timeout_type = nullptr;
inline PyObject* stopped_type = nullptr;
inline PyObject* report = nullptr;

// A call of the system has failed: MemoryError or OSError, with its number.
inline void set_system_error(const std::system_error& e) {
  if (e.code() == std::errc::not_enough_memory) {
    PyErr_SetString(PyExc_MemoryError, e.what());
  } else if (PyObject* parts = Py_BuildValue("(is)", e.code().value(), e.what())) {
    PyErr_SetObject(PyExc_OSError, parts);
    Py_DECREF(parts);
  }
}

// Runs `body`, turning what it throws into a Python error and nullptr.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (const PythonError&) {
  } catch (const Interrupted&) {  // the signal handler has set its error
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyboardInterrupt, "");
  } catch (const std::invalid_argument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const NoMemory& e) {
    PyErr_SetString(PyExc_MemoryError, e.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::system_error& e) {
    set_system_error(e);
  } catch (const LockTimeout& e) {
    PyErr_SetString(timeout_type, e.what());
  } catch (const Stopped& e) {
    PyErr_SetString(stopped_type, e.what());
  } catch (const RowsRefused& e) {
    PyErr_SetString(PyExc_BufferError, e.what());
  } catch (const NotASegment& e) {
    PyErr_SetString(PyExc_ConnectionError, e.what());
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_RuntimeError, e.what());
  }
  return nullptr;
}

// For `interrupted`: called without the interpreter lock, between slices of a wait.
inline bool signal_pending() {
  const PyGILState_STATE state = taking_gil(PyGILState_Ensure);
  const bool raised = PyErr_CheckSignals() != 0;
  PyGILState_Release(state);
  return raised;
}

// For `report_wait`: called without the interpreter lock. A log that fails is no reason to end a wait; Ctrl-C is.
inline bool report_to_log(const std::string& text) {
  const PyGILState_STATE state = taking_gil(PyGILState_Ensure);
  PyObject* result = PyObject_CallFunction(report, "s", text.c_str());
  if (!result && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
  Py_XDECREF(result);
  const bool raised = PyErr_Occurred() != nullptr;
  PyGILState_Release(state);
  return raised;
}

// A reference with an owner.
class Ref {
 public:
  explicit Ref(PyObject* owned = nullptr) : object_(owned) {}
  static Ref borrow(PyObject* o) {
    Py_XINCREF(o);
    return Ref(o);
  }
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = object_;
    object_ = other.release();
    Py_XDECREF(old);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() {
    PyObject* o = object_;
    object_ = nullptr;
    return o;
  }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// `o`, or PythonError when it is null: for calls that set an error.
inline PyObject* checked(PyObject* o) {
  if (!o) throw PythonError{};
  return o;
}

inline bool as_bool(PyObject* o) {
  const int v = PyObject_IsTrue(o);
  if (v < 0) throw PythonError{};
  return v == 1;
}

inline PyObject* interned(const char* s) { return checked(PyUnicode_InternFromString(s)); }

inline std::string text_of(PyObject* o) {
  Py_ssize_t n;
  const char* s = PyUnicode_AsUTF8AndSize(o, &n);
  if (!s) throw PythonError{};
  return {s, static_cast<size_t>(n)};
}

}  // namespace torchreplay::py
