// What users hand over for the fields of rows: checked, and ready to be copied row by row.
#pragma once

#include <optional>

#include "python/fields.h"

namespace torchreplay::py {

// The dimensions before a field's own. A time_count of -1 is learned from the first value.
struct Leading {
  bool times = false, lanes = false;
  int64_t time_count = -1, lane_count = -1;
  bool after_steps = false;       // of observations: there is one more of them than there are steps
  const char* several = nullptr;  // for messages: what takes values with a dimension more, before their number

  int dims() const { return times + lanes; }
};

// Throws std::invalid_argument unless there are as many rows as before. Arrays that repeat a value need no memory: they
// may be longer than anything.
inline void require_times(int64_t n, const FieldSpec& spec, Leading& leading) {
  const int64_t most = static_cast<int64_t>(kMaxKeys) / (leading.lanes ? leading.lane_count : 1);
  if (leading.time_count < 0 && n > most)
    throw std::invalid_argument("field '" + spec.path + "': got " + std::to_string(n) + " rows, expected at most " +
                                std::to_string(most) + ": there are no more keys");
  if (leading.time_count < 0) leading.time_count = n;
  if (n != leading.time_count)
    throw std::invalid_argument("field '" + spec.path + "': got " + std::to_string(n) +
                                (leading.after_steps ? " observations, expected one more than steps, which have "
                                                     : " rows, the fields before it have ") +
                                std::to_string(leading.time_count - leading.after_steps));
}

// Throws std::invalid_argument unless each number of a list of ints fits the field, whose dtype is unsigned.
inline void require_natural(const StridedArray& a, const FieldSpec& spec) {
  int64_t n = 1;
  for (int d = 0; d < a.dims; d++) n *= a.shape[d];
  const int bits = 8 * item_size(spec.element);
  for (int64_t i = 0; i < n; i++) {
    const auto value = detail::load<int64_t>(a.data + 8 * i);
    if (value < 0 || (bits < 64 && value >> bits))
      throw std::invalid_argument("field '" + spec.path + "': got " + std::to_string(value) + ", which " +
                                  element_name(spec.element) + " does not hold; nothing was written");
  }
}

// Throws std::invalid_argument where a number that the field does not hold would become another one, or infinite.
inline void refuse_unfit(const StridedArray& a, const FieldSpec& spec) {
  uint64_t bytes = item_size(a.element);
  for (int d = 0; d < a.dims; d++) bytes *= a.stride[d] ? static_cast<uint64_t>(a.shape[d]) : 1;
  Unfit unfit;
  const auto find = [&] { return find_unfit(a, spec.element, unfit); };
  const auto find_unlocked = [&] {
    const Unlocked others;
    return find();
  };
  if (!(bytes > kUnlockedBytes ? find_unlocked() : find())) return;
  const int dims = a.dims;
  throw std::invalid_argument("field '" + spec.path + "': got " + unfit.value +
                              (dims ? " at index " + shape_text(unfit.index, dims) : "") + ", which " +
                              element_name(spec.element) +
                              " does not hold: clip it, or choose another dtype for the "
                              "field; nothing was written");
}

// One field's value in a call.
class FieldValue {
 public:
  // Throws std::invalid_argument unless `o` has the shape and a dtype that casts.
  void open(PyObject* o, const FieldSpec& spec, Leading& leading) {
    view_.problem.clear();
    const bool scalar = ArrayView::is_scalar(o);
    // np.float64 is a float and numpy arrays are not: Python scalars are looked at first, they are the cheapest.
    const bool numbers = PyList_Check(o) || PyTuple_Check(o);
    const bool opened = scalar ? view_.open_scalar(o, spec.element) : numbers ? view_.open_anything(o) : view_.open(o);
    const StridedArray& a = view_.array;
    const int lead = leading.dims();
    if (!opened || a.dims != lead + static_cast<int>(spec.shape.size())) fail(o, spec, leading, opened);
    for (size_t d = 0; d < spec.shape.size(); d++)
      if (a.shape[lead + d] != spec.shape[d]) fail(o, spec, leading, opened);
    // Python ints in a list are int64 by now; one by itself is taken wherever it fits.
    const bool ints =
        numbers && a.element == Element::kI64 && spec.element >= Element::kU8 && spec.element <= Element::kU64;
    if (ints) require_natural(a, spec);
    if (!ints && !casts(a.element, spec.element))
      throw std::invalid_argument("field '" + spec.path +
                                  "': " + (scalar ? describe_scalar(o) : element_name(a.element)) +
                                  " does not cast to " + element_name(spec.element) +
                                  " by the same_kind rule: convert it explicitly" + as_bools(spec, numbers));
    if (leading.times) require_times(a.shape[0], spec, leading);
    if (leading.lanes && a.shape[lead - 1] != leading.lane_count) fail(o, spec, leading, opened);
    if (!scalar && !ints && a.element != spec.element) refuse_unfit(a, spec);
    time_stride_ = leading.times ? a.stride[0] : 0;
    lane_stride_ = leading.lanes ? a.stride[lead - 1] : 0;
    to_ = spec.element;
    lead_ = lead;
    nbytes_ = spec.nbytes;
    dense_ = a.element == spec.element && is_dense(a, lead);
  }

  // The same number in all rows. It stays where it is.
  void repeat(const int64_t& number) {
    view_.array.data = reinterpret_cast<const char*>(&number);
    time_stride_ = lane_stride_ = 0;
    to_ = Element::kI64;
    lead_ = 0;
    nbytes_ = sizeof number;
    dense_ = true;
  }

  // Copies it into the row in `slot`, which is busy.
  void write(const SegmentMemory& m, const Field& f, uint64_t slot, int64_t time, int64_t lane = 0) const {
    if (nbytes_ >= kStreamedBytes && dense_ && to_ != Element::kBool) return m.write(f, slot, at(time, lane));
    copy(m.value(f, slot), time, lane);
  }

  // A value that is copied as it is, and not long: so many bytes, from there on, for each time so much further on.
  struct Plain {
    const char* from;
    int64_t time_stride;
    uint64_t nbytes;  // 0: it is none
  };
  Plain plain() const {
    const bool is = dense_ && to_ != Element::kBool && nbytes_ < kStreamedBytes;
    return {view_.array.data, time_stride_, is ? nbytes_ : 0};
  }

  void copy(char* to, int64_t time, int64_t lane = 0) const {
    const char* from = at(time, lane);
    if (dense_)
      copy_value(to, from, nbytes_);
    else
      copy_converted(to, to_, from, view_.array, lead_);
    if (to_ == Element::kBool) make_bools(to, nbytes_);
  }

  // The value of a bool field without dimensions.
  uint8_t flag(int64_t time, int64_t lane = 0) const {
    char value = *at(time, lane);
    if (!dense_) copy_converted(&value, to_, at(time, lane), view_.array, lead_);
    return static_cast<uint8_t>(value);
  }

  bool is_zero(int64_t time, int64_t lane) const {
    std::vector<double> numbers(nbytes_ / item_size(to_));
    copy_converted(reinterpret_cast<char*>(numbers.data()), Element::kF64, at(time, lane), view_.array, lead_);
    return std::ranges::all_of(numbers, [](double number) { return number == 0; });
  }

  void release() { view_.release(); }

 private:
  const char* at(int64_t time, int64_t lane) const {
    return view_.array.data + time * time_stride_ + lane * lane_stride_;
  }

  static std::string describe_scalar(PyObject* o) {
    return PyFloat_Check(o) ? "a Python float" : PyBool_Check(o) ? "a Python bool" : "a Python int";
  }

  static std::string expected_shape(const FieldSpec& spec, const Leading& leading) {
    std::string sizes;
    auto add = [&sizes](const std::string& size) { sizes += (sizes.empty() ? "" : ", ") + size; };
    if (leading.times) add(leading.after_steps ? "n + 1" : "n");
    if (leading.lanes) add(std::to_string(leading.lane_count));
    for (int64_t size : spec.shape) add(std::to_string(size));
    const bool one = leading.dims() + spec.shape.size() == 1;
    return "(" + sizes + (one ? ",)" : ")");
  }

  [[noreturn]] void fail(PyObject* o, const FieldSpec& spec, const Leading& leading, bool opened) const {
    const std::string given = opened && ArrayView::is_scalar(o) ? describe_scalar(o) : describe(o, view_, opened);
    throw std::invalid_argument("field '" + spec.path + "': got " + given + ", expected " + element_name(spec.element) +
                                " of shape " + expected_shape(spec, leading) + advice(given, spec, leading, opened));
  }

  // What is probably meant.
  std::string advice(const std::string& given, const FieldSpec& spec, const Leading& leading, bool opened) const {
    if (given.starts_with("a value of type"))
      return " (a numpy array, a torch CPU tensor, a Python scalar or a list of numbers)";
    const auto dims = static_cast<int>(spec.shape.size());
    const StridedArray& a = view_.array;
    if (!opened || a.dims < dims || !std::equal(spec.shape.begin(), spec.shape.end(), a.shape + a.dims - dims))
      return "";
    const int lead = leading.dims();
    if (leading.several && a.dims == lead + dims + 1 && a.shape[lead] > 1)
      return std::string(": ") + leading.several + std::to_string(a.shape[lead]);
    if (leading.lanes && a.dims == lead + dims - 1)
      return ": this writer is of " + std::to_string(leading.lane_count) +
             " environments; buffer.writer() makes one of a single environment";
    return "";
  }

  // How numbers become bools.
  std::string as_bools(const FieldSpec& spec, bool sequence) const {
    if (spec.element != Element::kBool) return "";
    const std::string name = spec.path.substr(spec.path.rfind('/') + 1);
    if (view_.array.dims == 0) return ", such as bool(" + name + ")";
    if (sequence) return ", such as numpy.array(" + name + ", bool)";
    return ", such as " + name + (view_.of_tensor() ? ".bool()" : ".astype(bool)");
  }

  ArrayView view_;
  Element to_;
  int lead_ = 0;
  int64_t time_stride_ = 0, lane_stride_ = 0;
  uint64_t nbytes_ = 0;
  bool dense_ = false;
};

inline constexpr size_t kKeptRows = 1 << 16;  // memory for so many stays for a writer's next call

// Empties a vector; `v = {}` would keep its memory.
template <class T>
void give_back(std::vector<T>& v) {
  std::vector<T>().swap(v);
}

// The raw priorities of a call: none, one number for all rows, or one for each.
class Priorities {
 public:
  // `leading`: of the rows in the call; without any there is one row, and one number is expected.
  void open(PyObject* given, const Leading& leading) {
    each_.clear();
    all_ = {};
    if (!given || given == Py_None) return;
    ArrayView v;
    const bool one = leading.dims() == 0 || ArrayView::is_scalar(given);
    const bool opened = !one && v.open_anything(given);
    if (one || (opened && v.array.dims == 0)) {
      all_ = {kHasPriority, 0, checked_priority(number(given))};
      return;
    }
    std::vector<int64_t> shape;
    if (leading.times) shape.push_back(leading.time_count);
    if (leading.lanes) shape.push_back(leading.lane_count);
    int64_t rows = 1;
    for (int64_t size : shape) rows *= size;
    const int dims = leading.dims();
    if (!opened || v.array.dims != dims || !std::equal(shape.begin(), shape.end(), v.array.shape))
      throw std::invalid_argument("priority: got " + describe(given, v, opened) +
                                  ", expected one number, or one for each of the " + std::to_string(rows) +
                                  " rows: shape " + shape_text(shape.data(), dims));
    std::vector<double> raw(static_cast<size_t>(rows));
    copy_converted(reinterpret_cast<char*>(raw.data()), Element::kF64, v.array.data, v.array, 0);
    each_.reserve(raw.size());
    for (double p : raw) each_.push_back(checked_priority(p));
  }

  // They are needed no more.
  void release() {
    if (each_.capacity() > kKeptRows) give_back(each_);
  }

  RowMeta of(uint64_t row) const { return each_.empty() ? all_ : RowMeta{kHasPriority, 0, each_[row]}; }

 private:
  static double number(PyObject* o) {
    const double priority = PyFloat_AsDouble(o);
    if (priority != -1 || !PyErr_Occurred()) return priority;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw PythonError{};
    const bool refused = PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
                         PyErr_ExceptionMatches(PyExc_OverflowError) || is_wrong_tensor(o);
    if (!refused) throw PythonError{};  // such as the failure of a tensor's device
    PyErr_Clear();
    throw std::invalid_argument(
        "the priority is not one number that a float holds: expected a finite number, or None for the largest one "
        "seen");
  }

  // Whether it is the tensor's own fault that it gave no number, and not its device's. The exception stays set.
  static bool is_wrong_tensor(PyObject* o) {
    if (!is_tensor(o)) return false;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    const Ref on_cpu(PyObject_GetAttrString(o, "is_cpu")), n(PyObject_CallMethod(o, "numel", nullptr));
    const bool wrong = on_cpu.get() == Py_True || (n.get() && PyLong_AsLong(n.get()) != 1);
    PyErr_Restore(type, value, traceback);
    return wrong;
  }

  static float checked_priority(double priority) {
    if (!std::isfinite(priority))
      throw std::invalid_argument(
          "the priority is NaN or infinite: expected a finite number, or None for the largest one seen");
    constexpr double kMax = std::numeric_limits<float>::max();
    return static_cast<float>(std::min(std::fabs(priority), kMax));
  }

  RowMeta all_;
  std::vector<float> each_;
};

}  // namespace torchreplay::py
