// What users hand over for the ragged fields of rows: checked, and ready to be copied row by row.
#pragma once

#include <deque>
#include <memory>
#include <utility>

#include "python/field_values.h"
#include "segment/run.h"

namespace torchreplay::py {

// One ragged field's values in a call: an array [n, *shape] for each row, n from 0.
class RaggedValue {
 public:
  // Throws std::invalid_argument unless `o` has a value for each row, of a shape and a dtype that casts, and of at most
  // so many bytes. With `lengths` it has all of them, one after the other.
  void open(PyObject* o, const FieldSpec& spec, Leading& leading, PyObject* lengths, const Pages& pages) {
    release();
    leading_ = &leading;
    spec_ = &spec;
    pages_ = &pages;
    if (lengths)
      open_packed(o, lengths);
    else
      open_level(o, 0);
  }

  int64_t length(uint64_t row) const { return parts_[row].length; }
  size_t rows() const { return parts_.size(); }

  void copy(char* to, uint64_t row) const {
    const auto bytes = static_cast<uint64_t>(parts_[row].length) * spec_->nbytes;
    if (!bytes) return;
    std::memcpy(to, parts_[row].data, bytes);
    if (spec_->element == Element::kBool) make_bools(to, bytes);
  }

  void release() {
    if (parts_.capacity() > kKeptRows) give_back(parts_);
    parts_.clear();
    held_.clear();
    converted_.clear();
  }

 private:
  static constexpr int kDeepest = 8;  // lists in each other: one may hold itself

  struct Part {
    const char* data;
    int64_t length;
  };

  // The values below `depth` leading dimensions of the call.
  void open_level(PyObject* o, int depth) {
    const int levels = leading_->dims() - depth;
    if (levels == 0) return parts_.push_back(opened_value(o, false));
    if (is_one(o)) refuse_kind(o, levels);
    const bool packed = leading_->times && depth == 0 && PyTuple_Check(o);
    if (packed) return open_pair(o);
    const Ref list(PyList_Check(o) || PyTuple_Check(o) ? Ref::borrow(o).release() : listed(o));
    if (!list) return add_stacked(o, depth);
    const Py_ssize_t n = PySequence_Size(list.get());
    if (n < 0) throw PythonError{};
    require_count(n, depth);
    for (Py_ssize_t i = 0; i < n; i++) {
      const Ref value(checked(PySequence_GetItem(list.get(), i)));
      open_level(value.get(), depth + 1);
    }
  }

  // A tuple of (values, lengths).
  void open_pair(PyObject* o) {
    const auto is_array = [](PyObject* part) { return is_tensor(part) || PyObject_CheckBuffer(part); };
    PyObject* const values = PyTuple_Size(o) == 2 ? PyTuple_GetItem(o, 0) : nullptr;
    PyObject* const lengths = values ? PyTuple_GetItem(o, 1) : nullptr;
    if (!values || !is_array(values) || is_one(lengths) || !(is_array(lengths) || PyList_Check(lengths))) {
      std::string given = "a tuple of " + std::to_string(PyTuple_Size(o));
      if (values) given = "a tuple of " + type_text(values) + " and " + type_text(lengths);
      throw std::invalid_argument(named() + "got " + given +
                                  ", and a tuple is expected to be (values, lengths): an array or a tensor of all " +
                                  "elements one after the other, and how many each row has. Make an array of the " +
                                  "values, or give a list of one value for each row; nothing was written");
    }
    open_packed(values, lengths);
  }

  void open_packed(PyObject* o, PyObject* lengths) {
    ArrayView view;
    const bool opened = !is_one(lengths) && view.open_anything(lengths);
    const StridedArray& a = view.array;
    const bool integers = a.element > Element::kBool && a.element <= Element::kI64 && a.element != Element::kU64;
    const bool none = opened && a.dims == 1 && a.shape[0] == 0;  // an empty list says no dtype
    if (!opened || a.dims != leading_->dims() || !(integers || none))
      throw std::invalid_argument(named() + "its lengths are " + describe(lengths, view, opened) +
                                  ", expected integers of shape " + shape_of_rows());
    require_count(a.shape[0], 0);
    if (leading_->lanes) require_count(a.shape[a.dims - 1], leading_->times);
    int64_t rows = 1;
    for (int d = 0; d < a.dims; d++) rows *= a.shape[d];
    std::vector<int64_t> each(static_cast<size_t>(rows));
    if (rows) copy_converted(reinterpret_cast<char*>(each.data()), Element::kI64, a.data, a, 0);
    const Part all = opened_value(o, true);
    int64_t total = 0;
    for (size_t i = 0; i < each.size(); i++) {
      if (each[i] < 0 || each[i] > all.length - total) refuse_lengths(each, all.length);
      require_room(each[i]);
      parts_.push_back({all.data + static_cast<uint64_t>(total) * spec_->nbytes, each[i]});
      total += each[i];
    }
    if (total != all.length) refuse_lengths(each, all.length);
  }

  // An array of rows of one length: [n, length, *shape].
  void add_stacked(PyObject* o, int depth) {
    const int levels = leading_->dims() - depth;
    ArrayView view;
    const bool opened = is_array(o) && view.open_anything(o);
    const StridedArray& a = view.array;
    if (!opened || a.dims != levels + 1 + static_cast<int>(spec_->shape.size())) refuse_kind(o, levels, &view, opened);
    int64_t rows = 1;
    for (int d = 0; d < levels; d++) {
      require_count(a.shape[d], depth + d);
      rows *= a.shape[d];
    }
    const int64_t length = a.shape[levels];
    require_room(length);
    const char* data = dense(o, view, levels + 1);
    for (int64_t i = 0; i < rows; i++)
      parts_.push_back({data + static_cast<uint64_t>(i * length) * spec_->nbytes, length});
  }

  // One value, or those of all rows, in memory that stays until release().
  Part opened_value(PyObject* o, bool packed) {
    if (PyBytes_Check(o) || PyByteArray_Check(o)) require_bytes_field(o);
    if (PyBytes_CheckExact(o)) {
      if (!packed) require_room(PyBytes_Size(o));
      held_.emplace_back(Ref::borrow(o));
      return {PyBytes_AsString(o), PyBytes_Size(o)};
    }
    const bool numbers = PyList_Check(o) || PyTuple_Check(o);
    if (!numbers && !is_array(o) && (PyUnicode_Check(o) || PyDict_Check(o) || PyIter_Check(o) || o == Py_None))
      refuse_kind(o, 0);
    ArrayView view;
    const bool opened = is_array(o) ? view.open(o) : view.open_anything(o);
    const StridedArray& a = view.array;
    const bool plain = numbers || Py_TYPE(o) == &PyRange_Type;
    if (plain && opened && a.dims == 1 && a.shape[0] == 0) return {nullptr, 0};  // an empty list says no shape
    if (!opened || a.dims != 1 + static_cast<int>(spec_->shape.size())) refuse_kind(o, 0, &view, opened);
    if (!packed) require_room(a.shape[0]);
    const int64_t length = a.shape[0];
    return {dense(o, view, 1), length};
  }

  // The elements of an array, whose own dimensions begin at `first`, one after the other in the field's dtype.
  const char* dense(PyObject* o, ArrayView& view, int first) {
    const StridedArray& a = view.array;
    for (size_t d = 0; d < spec_->shape.size(); d++)
      if (a.shape[first + static_cast<int>(d)] != spec_->shape[d]) refuse_kind(o, first - 1, &view, true);
    uint64_t elements = 1;
    for (int d = 0; d < a.dims; d++) elements *= static_cast<uint64_t>(a.shape[d]);
    const bool ints = (PyList_Check(o) || PyTuple_Check(o)) && a.element == Element::kI64 &&
                      spec_->element >= Element::kU8 && spec_->element <= Element::kU64;
    if (!ints && !casts(a.element, spec_->element))
      throw std::invalid_argument(named() + element_name(a.element) + " does not cast to " +
                                  element_name(spec_->element) + " by the same_kind rule: convert it explicitly");
    if (ints) require_natural(a, *spec_);
    if (!ints && a.element != spec_->element) refuse_unfit(a, *spec_);
    if (a.element == spec_->element && is_dense(a, 0)) {
      view.lend(held_);
      return a.data;
    }
    const uint64_t bytes = elements * static_cast<uint64_t>(item_size(spec_->element));
    converted_.push_back(std::make_unique_for_overwrite<char[]>(bytes));
    char* const to = converted_.back().get();
    if (bytes) copy_converted(to, spec_->element, a.data, a, 0);
    return to;
  }

  void require_count(int64_t n, int depth) {
    if (leading_->times && depth == 0) return require_times(n, *spec_, *leading_);
    if (n != leading_->lane_count)
      throw std::invalid_argument(named() + "got " + std::to_string(n) + " values, expected one for each of the " +
                                  std::to_string(leading_->lane_count) + " environments");
  }

  // Throws std::invalid_argument for a value that is longer than any may be.
  void require_room(int64_t length) const {
    const uint64_t most = pages_->most_of_value();
    uint64_t bytes;
    const bool fits = !__builtin_mul_overflow(static_cast<uint64_t>(length), spec_->nbytes, &bytes) && bytes <= most;
    if (fits && static_cast<uint64_t>(length) <= kMaxLength) return;
    throw std::invalid_argument(named() + "a value has " + std::to_string(length) + " elements of " +
                                std::to_string(spec_->nbytes) + " bytes, and takes at most " +
                                std::to_string(std::min(most, kMaxLength * spec_->nbytes)) +
                                " bytes, a quarter of ragged_bytes=" + std::to_string(pages_->given) +
                                ": cut it, or make the buffer with more; nothing was written");
  }

  // A list of what an array of objects holds; null for all else.
  static PyObject* listed(PyObject* o) {
    if (Py_TYPE(o) != array_type) return nullptr;
    const Ref dtype(checked(PyObject_GetAttrString(o, "dtype")));
    const Ref kind(checked(PyObject_GetAttrString(dtype.get(), "kind")));
    return text_of(kind.get()) == "O" ? checked(PyObject_CallMethod(o, "tolist", nullptr)) : nullptr;
  }

  static bool is_array(PyObject* o) { return is_tensor(o) || PyObject_CheckBuffer(o); }
  // What is one value at most, and an iterable to Python.
  static bool is_one(PyObject* o) { return PyUnicode_Check(o) || PyBytes_Check(o) || PyByteArray_Check(o); }

  std::string named() const { return "field '" + spec_->path + "': "; }

  // The shape of a value: "(n, 3)".
  std::string shape_of_value() const {
    std::string sizes = "(n,";
    for (const int64_t size : spec_->shape) sizes += " " + std::to_string(size) + ",";
    if (!spec_->shape.empty()) sizes.pop_back();
    return sizes + ")";
  }
  std::string shape_of_rows() const {
    std::string sizes;
    if (leading_->times) sizes += leading_->time_count < 0 ? "rows," : std::to_string(leading_->time_count) + ",";
    if (leading_->lanes) sizes += (sizes.empty() ? "" : " ") + std::to_string(leading_->lane_count) + ",";
    if (leading_->dims() > 1) sizes.pop_back();
    return "(" + sizes + ")";
  }

  void require_bytes_field(PyObject* o) const {
    if (spec_->element != Element::kU8 || !spec_->shape.empty())
      throw std::invalid_argument(named() + "got " + type_text(o) + ", expected " + element_name(spec_->element) +
                                  " of shape " + shape_of_value() + ": bytes are for fields of uint8; " +
                                  "numpy.frombuffer(data, dtype) makes an array of them");
  }

  [[noreturn]] void refuse_lengths(const std::vector<int64_t>& each, int64_t elements) const {
    int64_t total = 0;
    for (size_t i = 0; i < each.size(); i++) {
      if (each[i] < 0)
        throw std::invalid_argument(named() + "the length at index " + std::to_string(i) + " is " +
                                    std::to_string(each[i]) + ": expected 0 or more; nothing was written");
      if (__builtin_add_overflow(total, each[i], &total)) total = std::numeric_limits<int64_t>::max();
    }
    throw std::invalid_argument(named() + "the lengths add up to " + std::to_string(total) + ", and there are " +
                                std::to_string(elements) + " elements; nothing was written");
  }

  // `levels`: of lists above the value.
  [[noreturn]] void refuse_kind(PyObject* o, int levels, const ArrayView* view = nullptr, bool opened = false) const {
    const std::string given = PyFloat_Check(o)  ? "a Python float"
                              : PyBool_Check(o) ? "a Python bool"
                              : PyLong_Check(o) ? "a Python int"
                              : o == Py_None    ? "None"
                              : view            ? describe(o, *view, opened)
                                                : type_text(o);
    std::string expected = std::string(element_name(spec_->element)) + " of shape " + shape_of_value();
    if (levels)
      expected = "a list of " + (levels == 1 && leading_->lanes ? std::to_string(leading_->lane_count) : "n") +
                 " values, each " + expected;
    const bool rows = opened && leading_->several && view->array.dims == 2 + static_cast<int>(spec_->shape.size());
    throw std::invalid_argument(
        named() + "got " + given + ", expected " + expected +
        (rows ? std::string(": ") + leading_->several + std::to_string(view->array.shape[0]) : advice(o)) +
        "; nothing was written");
  }

  std::string advice(PyObject* o) const {
    if (PyUnicode_Check(o)) return spec_->element == Element::kU8 ? ": pass text.encode()" : "";
    if (o == Py_None) return ": pass [] where there are no elements";
    if (ArrayView::is_scalar(o)) return ": pass a list of it";
    if (PyIter_Check(o)) return ": pass a list, list(values)";
    const std::string bad = bad_element(o);
    return bad.empty() ? "" : ": " + bad;
  }

  // Says where in a list something is that no array has: "at index [1][0] is a value of type str"; empty: nowhere.
  static std::string bad_element(PyObject* o, const std::string& index = "", int depth = 0) {
    if (!PyList_Check(o) && !PyTuple_Check(o))
      return index.empty() || ArrayView::is_scalar(o) || is_array(o) ? "" : "at index " + index + " is " + type_text(o);
    std::string bad;
    for (Py_ssize_t i = 0; bad.empty() && i < PySequence_Size(o) && depth < kDeepest; i++) {
      const Ref element(checked(PySequence_GetItem(o, i)));
      bad = bad_element(element.get(), index + "[" + std::to_string(i) + "]", depth + 1);
    }
    return bad;
  }

  const FieldSpec* spec_ = nullptr;
  Leading* leading_ = nullptr;
  const Pages* pages_ = nullptr;
  std::vector<Part> parts_;
  std::deque<LentArray> held_;
  std::vector<std::unique_ptr<char[]>> converted_;
};

// The ragged fields of a call, some of them or all.
class RaggedValues {
 public:
  // `pages`: those of which a value may take a quarter.
  RaggedValues(const Fields& fields, const Layout& layout, const Pages& pages)
      : fields_(fields), pages_(pages), values_(layout.ragged.size()), given_(fields.specs.size()) {}

  // There is no such field.
  bool empty() const { return values_.empty(); }

  // Where there are any.
  void open(size_t field, PyObject* o, Leading& leading) {
    const FieldSpec& spec = fields_.specs[field];
    const Ref& lengths = given_[field] ? given_[field] : given_[spec.of];
    values_[spec.column].open(o, spec, leading, lengths.get(), pages_);
  }

  // What `extend` got as its lengths: a dict of fields, or nothing.
  void read_lengths(PyObject* dict) {
    if (!dict || dict == Py_None) return;
    if (!PyDict_Check(dict))
      throw std::invalid_argument("lengths is " + type_text(dict) +
                                  ": expected a dict of the lengths [n] of ragged fields by name, such as "
                                  "batch[\"lengths\"]; nothing was written");
    read_level(fields_.tree, dict, "");
  }

  // Throws std::invalid_argument where fields that are like each other are not of one length.
  void check_alike(const std::vector<size_t>& fields) const {
    for (const size_t f : fields) {
      const FieldSpec& spec = fields_.specs[f];
      if (spec.of == f) continue;
      const RaggedValue &own = values_[spec.column], &other = values_[fields_.specs[spec.of].column];
      for (size_t row = 0; row < own.rows(); row++)
        if (own.length(row) != other.length(row))
          throw std::invalid_argument("field '" + spec.path + "': got " + std::to_string(own.length(row)) +
                                      " elements" + (own.rows() > 1 ? " at index " + std::to_string(row) : "") +
                                      ", and '" + fields_.specs[spec.of].path + "', whose length they have, " +
                                      std::to_string(other.length(row)) + "; nothing was written");
    }
  }

  const RaggedValue& of(size_t column) const { return values_[column]; }

  void release() {
    for (RaggedValue& v : values_) v.release();
    for (Ref& lengths : given_) lengths = Ref();
  }

 private:
  void read_level(const std::vector<Node>& level, PyObject* dict, const std::string& above) {
    PyObject *name, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &name, &value);) {
      const auto node = std::ranges::find_if(
          level, [&](const Node& n) { return PyUnicode_Check(name) && PyUnicode_Compare(n.name, name) == 0; });
      const std::string path = above + (PyUnicode_Check(name) ? text_of(name) : "(not a string)");
      const bool nested = node != level.end() && node->field < 0 && PyDict_Check(value);
      if (!nested && (node == level.end() || node->field < 0 || !fields_.specs[node->field].ragged()))
        throw std::invalid_argument("lengths has '" + path + "', which is no ragged field; nothing was written");
      if (nested)
        read_level(node->children, value, path + "/");
      else
        given_[static_cast<size_t>(node->field)] = Ref::borrow(value);
    }
  }

  const Fields& fields_;
  const Pages pages_;
  std::vector<RaggedValue> values_;  // of each ragged field
  std::vector<Ref> given_;           // lengths, of each field, where there are any
};

// Fills the pages of rows, beside what `Row` fills. `find(field, row)` gives the value of a ragged field, and which one
// of its call it is; nullptr: the row has none.
template <class Row, class Find>
class RaggedFill : public Row {
 public:
  RaggedFill(Row row, const Fields& fields, const Layout& layout, Find find)
      : Row(std::move(row)),
        fields_(fields),
        layout_(layout),
        find_(std::move(find)),
        lengths_(layout.pages.groups),
        offsets_(layout.ragged.size()) {}
  using Row::operator();

  // Of each group.
  const uint32_t* lengths(uint64_t row) {
    for (const size_t f : fields_.ragged) {
      const auto [value, index] = find_(f, row);
      lengths_[layout_.ragged[fields_.specs[f].column].group] = value ? static_cast<uint32_t>(value->length(index)) : 0;
    }
    return lengths_.data();
  }

  // After lengths(row).
  void run(uint64_t row, char* to) {
    place_values(layout_.ragged, lengths_.data(), offsets_.data());
    for (const size_t f : fields_.ragged) {
      const auto [value, index] = find_(f, row);
      if (value) value->copy(to + offsets_[fields_.specs[f].column], index);
    }
  }

  // Returns the bytes of the values of `n` rows; throws std::invalid_argument where one has more than a quarter of the
  // pages.
  uint64_t checked_bytes(uint64_t n, const Pages& pages) {
    if (!pages.are_there()) return 0;
    uint64_t bytes = 0;
    for (uint64_t row = 0; row < n; row++) {
      const uint64_t own = place_values(layout_.ragged, lengths(row), nullptr);
      if (own > pages.most_of_row())
        throw std::invalid_argument("the values of a row take " + std::to_string(own) + " bytes together" +
                                    (n > 1 ? " at index " + std::to_string(row) : "") + ", and may take at most " +
                                    std::to_string(pages.most_of_row()) +
                                    ", a quarter of ragged_bytes=" + std::to_string(pages.given) +
                                    ": cut them, or make the buffer with more; nothing was written");
      bytes += own;
    }
    return bytes;
  }

 private:
  const Fields& fields_;
  const Layout& layout_;
  Find find_;
  std::vector<uint32_t> lengths_;
  std::vector<uint64_t> offsets_;
};

}  // namespace torchreplay::py
