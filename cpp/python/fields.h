// The spec as the binding needs it: names, nesting, shapes; and the matching of keyword arguments to fields.
#pragma once

#include <vector>

#include "arrays.h"

namespace torchreplay::py {

inline constexpr uint64_t kMaxFieldBytes = uint64_t{1} << 46;

struct FieldSpec {
  std::string path;  // "obs/image"
  Element element;
  std::vector<int64_t> shape;
  uint64_t nbytes;
};

// A name of the spec: a field, or a dict of names.
struct Node {
  PyObject* name = nullptr;  // interned, never freed: specs are few
  int field = -1;
  std::vector<Node> children;
};

struct Fields {
  std::vector<FieldSpec> specs;
  std::vector<Node> tree;

  // What the layout is made from.
  std::vector<Field> columns() const {
    std::vector<Field> columns;
    columns.reserve(specs.size());
    for (const FieldSpec& f : specs) columns.push_back({f.element, f.nbytes});
    return columns;
  }

  // From a list of (path: tuple[str, ...], element: int, shape: tuple[int, ...]).
  static Fields parse(PyObject* list) {
    Fields f;
    const Py_ssize_t n = PyList_Size(list);
    if (n < 0) throw PythonError{};
    for (Py_ssize_t i = 0; i < n; i++) {
      PyObject *path, *shape;
      int element;
      if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O!iO!", &PyTuple_Type, &path, &element, &PyTuple_Type, &shape))
        throw PythonError{};
      if (element < 0 || element >= kElements)
        throw std::invalid_argument("unknown element type " + std::to_string(element));
      FieldSpec spec{
          "", static_cast<Element>(element), {}, static_cast<uint64_t>(item_size(static_cast<Element>(element)))};
      for (Py_ssize_t d = 0; d < PyTuple_Size(shape); d++) {
        const int64_t size = PyLong_AsLongLong(PyTuple_GetItem(shape, d));
        if (size == -1 && PyErr_Occurred()) throw PythonError{};
        if (size < 1 || spec.nbytes > kMaxFieldBytes / static_cast<uint64_t>(size))
          throw std::invalid_argument("a field has a size below 1 or needs more than 64 TiB");
        spec.shape.push_back(size);
        spec.nbytes *= static_cast<uint64_t>(size);
      }
      f.place(path, static_cast<int>(i), spec);
      f.specs.push_back(std::move(spec));
    }
    return f;
  }

 private:
  void place(PyObject* path, int field, FieldSpec& spec) {
    std::vector<Node>* level = &tree;
    const Py_ssize_t depth = PyTuple_Size(path);
    for (Py_ssize_t d = 0; d < depth; d++) {
      const std::string name = text_of(PyTuple_GetItem(path, d));
      spec.path += (d ? "/" : "") + name;
      Node* node = nullptr;
      for (Node& candidate : *level)
        if (text_of(candidate.name) == name) node = &candidate;
      if (!node) {
        level->push_back({PyUnicode_InternFromString(name.c_str()), -1, {}});
        node = &level->back();
      }
      if (d + 1 == depth) node->field = field;
      level = &node->children;
    }
  }
};

[[noreturn]] inline void throw_names(const std::vector<Node>& level, const std::string& prefix, const char* problem,
                                     const std::string& name) {
  std::string expected;
  for (const Node& n : level) expected += (expected.empty() ? "'" : ", '") + prefix + text_of(n.name) + "'";
  throw std::invalid_argument(std::string(problem) + " field '" + prefix + name + "': expected exactly " + expected);
}

// Collects the value given for every field of `level` from a dict. Throws std::invalid_argument naming what is missing
// or unknown.
inline void collect(const std::vector<Node>& level, PyObject* dict, const std::string& prefix, PyObject** values,
                    std::vector<Ref>& held) {
  for (const Node& n : level) {
    PyObject* v = PyDict_GetItemWithError(dict, n.name);
    if (v) held.push_back(Ref::borrow(v));
    if (!v) {
      if (PyErr_Occurred()) throw PythonError{};
      throw_names(level, prefix, "missing", text_of(n.name));
    }
    if (n.field >= 0) {
      values[n.field] = v;
    } else if (PyDict_Check(v)) {
      collect(n.children, v, prefix + text_of(n.name) + "/", values, held);
    } else {
      throw std::invalid_argument("field '" + prefix + text_of(n.name) + "' is nested: expected a dict");
    }
  }
  if (PyDict_Size(dict) == static_cast<Py_ssize_t>(level.size())) return;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    bool known = false;
    for (const Node& n : level) known |= PyUnicode_Check(key) && PyUnicode_Compare(key, n.name) == 0;
    if (!known) throw_names(level, prefix, "unknown", PyUnicode_Check(key) ? text_of(key) : "(not a string)");
  }
}

// Matches the keyword arguments of one call to the names of the spec. A call site passes the same tuple of names every
// time, so the last matching is kept.
class KeywordMatcher {
 public:
  explicit KeywordMatcher(const Fields& fields) : fields_(fields) {}
  ~KeywordMatcher() { Py_XDECREF(names_); }
  KeywordMatcher(const KeywordMatcher&) = delete;

  // Fills `values` (one per field) and `priority` (nullptr when not given), which live until release().
  void match(PyObject* const* args, PyObject* names, PyObject** values, PyObject*& priority) {
    if (names != names_ || !names) learn(names);
    for (size_t i = 0; i < targets_.size(); i++) {
      const Node* node = targets_[i];
      if (!node)
        priority = args[i];
      else if (node->field >= 0)
        values[node->field] = args[i];
      else if (PyDict_Check(args[i]))
        collect(node->children, args[i], text_of(node->name) + "/", values, held_);
      else
        throw std::invalid_argument("field '" + text_of(node->name) + "' is nested: expected a dict");
    }
  }

  void release() { held_.clear(); }

 private:
  void learn(PyObject* names) {
    targets_.clear();
    Py_XDECREF(names_);
    names_ = nullptr;
    std::vector<bool> seen(fields_.tree.size());
    const Py_ssize_t n = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < n; i++) {
      PyObject* name = PyTuple_GetItem(names, i);
      const Node* target = nullptr;
      for (size_t k = 0; k < fields_.tree.size(); k++)
        if (fields_.tree[k].name == name || PyUnicode_Compare(fields_.tree[k].name, name) == 0) {
          target = &fields_.tree[k];
          seen[k] = true;
        }
      if (!target && PyUnicode_CompareWithASCIIString(name, "priority") != 0) {
        targets_.clear();
        throw_names(fields_.tree, "", "unknown", text_of(name));
      }
      targets_.push_back(target);
    }
    for (size_t k = 0; k < seen.size(); k++)
      if (!seen[k]) {
        targets_.clear();
        throw_names(fields_.tree, "", "missing", text_of(fields_.tree[k].name));
      }
    Py_XINCREF(names);
    names_ = names;
  }

  const Fields& fields_;
  PyObject* names_ = nullptr;
  std::vector<const Node*> targets_;  // nullptr: priority
  std::vector<Ref> held_;             // nested values
};

// One field's value in a call: checked, and ready to be copied row by row.
class FieldValue {
 public:
  // `lead`: 0 for one row, 1 for `rows` rows (learned from the first field when -1). Throws std::invalid_argument.
  void open(PyObject* o, const FieldSpec& spec, int lead, int64_t& rows) {
    view_.problem.clear();
    const bool scalar = ArrayView::is_scalar(o);
    // np.float64 is a float and numpy arrays are not: Python scalars are looked at first, they are the cheapest.
    const bool opened = scalar ? view_.open_scalar(o, spec.element) : view_.open(o);
    const StridedArray& a = view_.array;
    if (!opened || a.dims != lead + static_cast<int>(spec.shape.size())) fail(o, spec, lead, opened);
    for (size_t d = 0; d < spec.shape.size(); d++)
      if (a.shape[lead + d] != spec.shape[d]) fail(o, spec, lead, opened);
    if (!casts(a.element, spec.element))
      throw std::invalid_argument(
          "field '" + spec.path + "': " + (scalar ? describe_scalar(o) : element_name(a.element)) +
          " does not cast to " + element_name(spec.element) + " by the same_kind rule: convert it explicitly");
    if (lead) {
      if (rows < 0) rows = a.shape[0];
      if (a.shape[0] != rows)
        throw std::invalid_argument("field '" + spec.path + "': got " + std::to_string(a.shape[0]) +
                                    " rows, the fields before it have " + std::to_string(rows));
    }
    to_ = spec.element;
    lead_ = lead;
    nbytes_ = spec.nbytes;
    dense_ = a.element == spec.element && is_dense(a, lead);
  }

  void copy(char* to, uint64_t row) const {
    const char* from = view_.array.data + (lead_ ? static_cast<int64_t>(row) * view_.array.stride[0] : 0);
    if (dense_)
      copy_value(to, from, nbytes_);
    else
      copy_converted(to, to_, from, view_.array, lead_);
  }

  void release() { view_.release(); }

 private:
  static std::string describe_scalar(PyObject* o) {
    return PyFloat_Check(o) ? "a Python float" : PyBool_Check(o) ? "a Python bool" : "a Python int";
  }

  [[noreturn]] void fail(PyObject* o, const FieldSpec& spec, int lead, bool opened) const {
    std::string expected = shape_text(spec.shape.data(), static_cast<int>(spec.shape.size()));
    if (lead) {
      expected = "(n";
      for (int64_t size : spec.shape) expected += ", " + std::to_string(size);
      expected += spec.shape.empty() ? ",)" : ")";
    }
    const std::string given = opened && ArrayView::is_scalar(o) ? describe_scalar(o) : describe(o, view_, opened);
    const char* advice =
        given.starts_with("a value of type") ? " (a numpy array, a torch CPU tensor or a Python scalar)" : "";
    throw std::invalid_argument("field '" + spec.path + "': got " + given + ", expected " + element_name(spec.element) +
                                " of shape " + expected + advice);
  }

  ArrayView view_;
  Element to_;
  int lead_ = 0;
  uint64_t nbytes_ = 0;
  bool dense_ = false;
};

}  // namespace torchreplay::py
