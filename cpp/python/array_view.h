// Reading what users hand over (numpy arrays and scalars, torch tensors, Python scalars) without copying it first.
#pragma once

#include <ATen/dlpack.h>

#include <climits>
#include <deque>
#include <utility>

#include "python/errors.h"

namespace torchreplay::py {

// torch's C exchange API and the type it belongs to. All of these are set once, by init_arrays().
inline const DLPackExchangeAPI* exchange = nullptr;
inline PyTypeObject* tensor_type = nullptr;
inline PyObject* as_tensor = nullptr;  // for what is neither tensor nor array: numbers in sequences

// numpy.ndarray, and astype(array, dtype), which raises ArithmeticError where a finite number becomes infinite.
inline PyTypeObject* array_type = nullptr;
inline PyObject* astype = nullptr;

inline const char* element_name(Element e) {
  constexpr const char* names[kElements] = {"bool",  "uint8", "uint16",  "uint32",   "uint64",  "int8",   "int16",
                                            "int32", "int64", "float16", "bfloat16", "float32", "float64"};
  return names[static_cast<int>(e)];
}

inline DLDataType dl_type(Element e) {
  const uint8_t bits = static_cast<uint8_t>(8 * item_size(e));
  if (e == Element::kBool) return {kDLBool, 8, 1};
  if (e == Element::kBF16) return {kDLBfloat, 16, 1};
  if (e <= Element::kU64) return {kDLUInt, bits, 1};
  if (e <= Element::kI64) return {kDLInt, bits, 1};
  return {kDLFloat, bits, 1};
}

inline bool is_tensor(PyObject* o) {
  PyTypeObject* t = Py_TYPE(o);
  return tensor_type && (t == tensor_type || PyType_IsSubtype(t, tensor_type));
}

// What keeps an array's memory where it is.
class LentArray {
 public:
  explicit LentArray(Ref held) : held_(std::move(held)) {}
  explicit LentArray(const Py_buffer& buffer) : buffer_(buffer), has_buffer_(true) {}
  LentArray(const LentArray&) = delete;
  ~LentArray() {
    if (has_buffer_) PyBuffer_Release(&buffer_);
  }

 private:
  Py_buffer buffer_{};
  bool has_buffer_ = false;
  Ref held_;
};

// A user's array while it is read. `problem` says why it cannot be read as one.
class ArrayView {
 public:
  StridedArray array;
  std::string problem;

  ArrayView() = default;
  ArrayView(const ArrayView&) = delete;
  ~ArrayView() { release(); }

  void release() {
    if (has_buffer_) PyBuffer_Release(&buffer_);
    has_buffer_ = false;
    held_ = Ref();
  }

  // Hands over what keeps the memory, which stays as long as `to` has it.
  void lend(std::deque<LentArray>& to) {
    if (std::exchange(has_buffer_, false)) to.emplace_back(buffer_);
    if (held_) to.emplace_back(std::move(held_));
  }

  // False with `problem` set when `o` is no array on the CPU; no Python error is left behind.
  // The view keeps what it needs of `o` alive.
  bool open(PyObject* o) {
    if (!is_tensor(o)) return open_buffer(o);
    held_ = Ref::borrow(o);
    return open_tensor(o);
  }

  // Like open(), but fetches tensors of other devices and takes sequences of numbers too. Throws PythonError.
  bool open_anything(PyObject* o) {
    if (open(o)) return true;
    if (is_masked(o)) return false;
    const bool elsewhere = is_tensor(o);
    held_ =
        Ref(elsewhere ? PyObject_CallMethod(o, "cpu", nullptr) : PyObject_CallFunctionObjArgs(as_tensor, o, nullptr));
    if (!held_) {
      // Ctrl-C in code of the array's, and the failure of a device, are no fault of what was given.
      const bool fault =
          PyErr_ExceptionMatches(PyExc_Exception) && (PyErr_ExceptionMatches(PyExc_NotImplementedError) || !elsewhere);
      if (!fault) throw PythonError{};
      PyErr_Clear();
      return is_ragged(o) && fail("a list whose parts are of different lengths: pad them to one shape");
    }
    problem.clear();
    return open_tensor(held_.get()) || (elsewhere && open_widened());
  }

  // A Python scalar as a 0-dimensional array of the field's own type. False with `problem` when it does not fit.
  bool open_scalar(PyObject* o, Element to) {
    array.dims = 0;
    array.data = scalar_;
    array.element = to;
    if (PyFloat_Check(o)) {
      array.element = to >= Element::kF16 ? to : Element::kF64;
      const double v = PyFloat_AsDouble(o);
      return store(v, array.element) ||
             fail(detail::as_text(v) + ", which " + element_name(to) + " does not hold: clip it");
    }
    if (PyBool_Check(o)) {
      array.element = Element::kBool;
      scalar_[0] = o == Py_True;
      return true;
    }
    return open_int(o, to);
  }

  // Whether it reads a tensor's memory.
  bool of_tensor() const { return held_ && is_tensor(held_.get()); }

  static bool is_scalar(PyObject* o) { return PyFloat_Check(o) || PyLong_Check(o); }

 private:
  bool fail(std::string why) {
    problem = std::move(why);
    return false;
  }

  bool open_tensor(PyObject* o) {
    DLTensor t;
    if (exchange->dltensor_from_py_object_no_sync(o, &t)) {
      PyErr_Clear();
      return fail(is_set(o, "is_nested") ? "a nested tensor: pass list(tensor.unbind())"
                                         : "a tensor whose memory cannot be read (sparse, meta or quantised)");
    }
    if (t.device.device_type != kDLCPU && t.device.device_type != kDLCUDAHost)
      return fail("a tensor that is not on the CPU: pass tensor.cpu()");
    if (t.ndim > StridedArray::kMaxDims) return fail("a tensor of more than 16 dimensions");
    if (!element_of(t.dtype)) return fail("a tensor of a dtype that a row cannot hold");
    array.dims = t.ndim;
    int64_t count = 1;
    bool canonical = t.ndim > 0;
    for (int d = t.ndim - 1; d >= 0; d--) {
      const int64_t stride = t.strides ? t.strides[d] : count;
      canonical &= stride == count;
      array.shape[d] = t.shape[d];
      array.stride[d] = stride * item_size(array.element);
      count *= t.shape[d];
    }
    if (!t.data && count) return fail("a tensor without memory (resized away, fake or not computed yet)");
    array.data = static_cast<const char*>(t.data) + t.byte_offset;
    // The imaginary part of a conjugate is stored with the other sign; its strides give it away, or it is one number.
    if (!canonical && array.element >= Element::kF16 && is_negated(o))
      return fail("a tensor whose negation is pending: pass tensor.resolve_neg()");
    return true;
  }

  // Floats that no row holds (float8) are numbers all the same. `held_` is a tensor that open_tensor() refused.
  bool open_widened() {
    const Ref floating(PyObject_CallMethod(held_.get(), "is_floating_point", nullptr));
    Ref widened(floating.get() == Py_True ? PyObject_CallMethod(held_.get(), "float", nullptr) : nullptr);
    if (!widened) {
      if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError{};
      PyErr_Clear();
      return false;
    }
    held_ = std::move(widened);
    problem.clear();
    return open_tensor(held_.get());
  }

  static bool is_set(PyObject* o, const char* flag) {
    const Ref answer(PyObject_GetAttrString(o, flag));
    if (!answer) PyErr_Clear();
    return answer && as_bool(answer.get());
  }

  static bool is_negated(PyObject* o) {
    const Ref answer(PyObject_CallMethod(o, "is_neg", nullptr));
    if (!answer) PyErr_Clear();
    return answer && as_bool(answer.get());
  }

  bool element_of(DLDataType t) {
    if (t.lanes != 1) return false;
    for (int e = 0; e < kElements; e++) {
      const DLDataType own = dl_type(static_cast<Element>(e));
      if (own.code == t.code && own.bits == t.bits) {
        array.element = static_cast<Element>(e);
        return true;
      }
    }
    return false;
  }

  // Whether values of a numpy array are masked. Where numpy.ma was not imported there are none.
  static bool is_masked(PyObject* o) {
    if (Py_TYPE(o) == array_type || !array_type || !PyType_IsSubtype(Py_TYPE(o), array_type)) return false;
    static PyObject* const name = interned("numpy.ma");
    const Ref masked_arrays(PyImport_GetModule(name));
    if (!masked_arrays && PyErr_Occurred()) throw PythonError{};
    if (!masked_arrays) return false;
    const Ref answer(checked(PyObject_CallMethod(masked_arrays.get(), "is_masked", "O", o)));
    return as_bool(answer.get());
  }

  // Whether the parts of a list differ in length, also those of its parts. Looks at so many parts at most.
  static bool is_ragged(PyObject* o) {
    int parts = 10'000;
    return is_ragged(o, 0, parts);
  }
  static bool is_ragged(PyObject* o, int depth, int& parts) {
    const bool is_list = PyList_CheckExact(o);
    if (depth > StridedArray::kMaxDims || (!is_list && !PyTuple_CheckExact(o))) return false;
    const Py_ssize_t n = is_list ? PyList_Size(o) : PyTuple_Size(o);
    Py_ssize_t length = -1;
    for (Py_ssize_t i = 0; i < n && parts > 0; i++, parts--) {
      const Ref part(PySequence_GetItem(o, i));
      if (!part) {
        PyErr_Clear();
        return false;
      }
      const bool has_length = PyList_CheckExact(part.get()) || PyTuple_CheckExact(part.get()) ||
                              is_tensor(part.get()) || Py_TYPE(part.get()) == array_type;
      const Py_ssize_t size = has_length ? PyObject_Size(part.get()) : -1;
      PyErr_Clear();  // arrays without dimensions have none
      if ((i > 0 && size != length) || is_ragged(part.get(), depth + 1, parts)) return true;
      length = size;
    }
    return false;
  }

  bool open_buffer(PyObject* o) {
    if (is_masked(o)) return fail("an array of which values are masked: pass array.filled(...)");
    if (PyObject_GetBuffer(o, &buffer_, PyBUF_RECORDS_RO)) {
      PyErr_Clear();
      return fail("");
    }
    has_buffer_ = true;
    if (buffer_.ndim > StridedArray::kMaxDims) return fail("an array of more than 16 dimensions");
    if (!element_of(buffer_.format ? buffer_.format : "B", buffer_.itemsize)) {
      std::string why = std::string("an array of a dtype that a row cannot hold (format '") + buffer_.format + "')";
      return open_converted(o) || (problem.empty() && fail(std::move(why)));
    }
    array.data = static_cast<const char*>(buffer_.buf);
    array.dims = buffer_.ndim;
    int64_t dense = buffer_.itemsize;
    for (int d = buffer_.ndim - 1; d >= 0; d--) {
      array.shape[d] = buffer_.shape[d];
      array.stride[d] = buffer_.strides ? buffer_.strides[d] : dense;
      dense *= buffer_.shape[d];
    }
    return true;
  }

  // Numbers of numpy's that no field holds and that cast to those which fields do: the other byte order, long doubles.
  bool open_converted(PyObject* o) {
    const char* format = buffer_.format;
    Py_ssize_t size = buffer_.itemsize;
    if (*format == '>') format++;
    if (!*format || format[1]) return false;
    const char kind = std::strchr("BHILQN", *format) ? 'u' : std::strchr("bhilqn", *format) ? 'i' : 'f';
    if (*format == 'g')
      size = 8;
    else if (format == buffer_.format || (kind == 'f' && !std::strchr("efd", *format)))
      return false;
    const Ref native(PyObject_CallFunction(astype, "Os", o, (kind + std::to_string(size)).c_str()));
    if (!native) {
      if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError{};  // Ctrl-C in code of the array's
      const bool beyond = PyErr_ExceptionMatches(PyExc_ArithmeticError);
      PyErr_Clear();
      if (beyond) return fail("long doubles, one of which float64 does not hold: clip it");
    }
    if (!native || native.get() == o) return false;
    release();
    held_ = Ref::borrow(native.get());
    return open_buffer(native.get());
  }

  bool element_of(const char* format, Py_ssize_t size) {
    if (*format == '@' || *format == '=' || *format == '<') format++;  // little-endian machines only
    if (!*format || format[1]) return false;
    const int log2 = size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : size == 8 ? 3 : -1;
    if (log2 < 0) return false;
    if (*format == '?')
      array.element = Element::kBool;
    else if (std::strchr("BHILQN", *format))
      array.element = static_cast<Element>(static_cast<int>(Element::kU8) + log2);
    else if (std::strchr("bhilqn", *format))
      array.element = static_cast<Element>(static_cast<int>(Element::kI8) + log2);
    else if (*format == 'e')
      array.element = Element::kF16;
    else if (*format == 'f')
      array.element = Element::kF32;
    else if (*format == 'd' && size == 8)
      array.element = Element::kF64;
    else
      return false;
    return true;
  }

  bool open_int(PyObject* o, Element to) {
    if (to == Element::kBool) {
      array.element = Element::kI64;  // does not cast: the caller says so
      return true;
    }
    if (to >= Element::kF16) {
      const double v = PyLong_AsDouble(o);
      if (v == -1 && PyErr_Occurred()) return out_of_range(to);
      return store(v, to) || out_of_range(to);
    }
    if (to == Element::kU64) {
      const unsigned long long v = PyLong_AsUnsignedLongLong(o);
      if (v == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return out_of_range(to);
      std::memcpy(scalar_, &v, 8);
      return true;
    }
    const long long v = PyLong_AsLongLong(o);
    if (v == -1 && PyErr_Occurred()) return out_of_range(to);
    const int bits = 8 * item_size(to);
    const bool is_signed = to >= Element::kI8;
    const long long low = is_signed ? (bits == 64 ? LLONG_MIN : -(1LL << (bits - 1))) : 0,
                    high = bits == 64 ? LLONG_MAX : (1LL << (bits - is_signed)) - 1;
    if (v < low || v > high) return out_of_range(to);
    std::memcpy(scalar_, &v, 8);  // little-endian: the low bytes are the value
    return true;
  }

  bool out_of_range(Element to) {
    PyErr_Clear();
    return fail(std::string("a Python int that is out of range for ") + element_name(to));
  }

  // False when `v` is finite and `to` does not hold it.
  bool store(double v, Element to) {
    StridedArray source;
    source.element = Element::kF64;
    source.data = reinterpret_cast<const char*>(&v);
    copy_converted(scalar_, to, source.data, source, 0);
    constexpr double kFitsAll = 65504;  // the largest float16
    Unfit unfit;
    return std::fabs(v) <= kFitsAll || !find_unfit(source, to, unfit);
  }

  alignas(8) char scalar_[8];
  Py_buffer buffer_;
  bool has_buffer_ = false;
  Ref held_;
};

inline std::string shape_text(const int64_t* shape, int dims) {
  std::string s = "(";
  for (int d = 0; d < dims; d++) s += (d ? ", " : "") + std::to_string(shape[d]);
  return s + (dims == 1 ? ",)" : ")");
}

inline std::string type_text(PyObject* o) {
  Ref type(PyType_GetName(Py_TYPE(o)));
  return std::string("a value of type ") + (type ? text_of(type.get()) : "?");
}

// What was given, for error messages.
inline std::string describe(PyObject* o, const ArrayView& v, bool opened) {
  if (opened && !ArrayView::is_scalar(o))
    return std::string(element_name(v.array.element)) + " of shape " + shape_text(v.array.shape, v.array.dims);
  return v.problem.empty() ? type_text(o) : v.problem;
}

}  // namespace torchreplay::py
