// The spec as the binding needs it: names, nesting, shapes; and the matching of keyword arguments to fields.
#pragma once

#include <algorithm>
#include <vector>

#include "python/array_view.h"

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
        level->push_back({interned(name.c_str()), -1, {}});
        node = &level->back();
      }
      if (d + 1 == depth) node->field = field;
      level = &node->children;
    }
  }
};

[[noreturn]] inline void throw_names(const std::vector<Node>& level, const std::string& prefix, const char* problem,
                                     const std::string& name, const std::string& advice = "") {
  std::string expected;
  for (const Node& n : level) expected += (expected.empty() ? "'" : ", '") + prefix + text_of(n.name) + "'";
  throw std::invalid_argument(std::string(problem) + " field '" + prefix + name + "': expected exactly " + expected +
                              advice);
}

inline void collect(const std::vector<Node>& level, PyObject* dict, const std::string& prefix, PyObject** values,
                    std::vector<Ref>& held);

// The values of a nested node: a dict, or the tuple that a Tuple space makes when the names are "0", "1", ...
inline void collect_nested(const Node& node, PyObject* value, const std::string& path, PyObject** values,
                           std::vector<Ref>& held) {
  if (PyDict_Check(value)) return collect(node.children, value, path + "/", values, held);
  if (!PyTuple_Check(value))
    throw std::invalid_argument("field '" + path + "' is nested: expected a dict, got " + type_text(value) +
                                (PyObject_HasAttrString(value, "to_dict") ? ": pass its .to_dict()" : ""));
  Ref dict(checked(PyDict_New()));
  for (Py_ssize_t i = 0; i < PyTuple_Size(value); i++) {
    Ref name(checked(PyUnicode_FromFormat("%zd", i)));
    if (PyDict_SetItem(dict.get(), name.get(), PyTuple_GetItem(value, i))) throw PythonError{};
  }
  collect(node.children, dict.get(), path + "/", values, held);
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
    if (n.field >= 0)
      values[n.field] = v;
    else
      collect_nested(n, v, prefix + text_of(n.name), values, held);
  }
  if (PyDict_Size(dict) == static_cast<Py_ssize_t>(level.size())) return;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);) {
    bool known = false;
    for (const Node& n : level) known |= PyUnicode_Check(key) && PyUnicode_Compare(key, n.name) == 0;
    if (!known) throw_names(level, prefix, "unknown", PyUnicode_Check(key) ? text_of(key) : "(not a string)");
  }
}

// The part of a tree of names that leads to the fields for which keep(field) is true.
template <class Keep>
std::vector<Node> pruned(const std::vector<Node>& tree, const Keep& keep) {
  std::vector<Node> kept;
  for (const Node& n : tree) {
    Node copy{n.name, n.field, pruned(n.children, keep)};
    if (n.field >= 0 ? keep(n.field) : !copy.children.empty()) kept.push_back(std::move(copy));
  }
  return kept;
}

// Matches the keyword arguments of one call to names of the spec. A call site passes the same tuple of names every
// time, so the last matching is kept.
class KeywordMatcher {
 public:
  // `option`, when not null, is a keyword beside the fields. `observed`: the fields of which next ones are made when a
  // batch is drawn; they outlive the matcher.
  explicit KeywordMatcher(std::vector<Node> tree, const char* option = nullptr, const char* second = nullptr,
                          const std::vector<Node>* observed = nullptr)
      : tree_(std::move(tree)), options_{option, second}, observed_(observed) {}
  ~KeywordMatcher() { Py_XDECREF(names_); }
  KeywordMatcher(const KeywordMatcher&) = delete;

  // Fills `values` (one per field) and `options` (nullptr when not given), which live until release().
  void match(PyObject* const* args, PyObject* names, PyObject** values, PyObject** options) {
    if (!names || (names != names_ && !known(names))) learn(names);
    for (size_t i = 0; i < targets_.size(); i++) {
      const Target& target = targets_[i];
      if (!target.node)
        options[target.option] = args[i];
      else if (target.node->field >= 0)
        values[target.node->field] = args[i];
      else
        collect_nested(*target.node, args[i], text_of(target.node->name), values, held_);
    }
  }

  void release() { held_.clear(); }

 private:
  struct Target {
    const Node* node;
    int option;
  };

  // Whether these are the names of the call before in another tuple: Python makes one of every **dict.
  bool known(PyObject* names) const {
    const auto n = static_cast<Py_ssize_t>(targets_.size());
    if (!names_ || PyTuple_Size(names) != n) return false;
    for (Py_ssize_t i = 0; i < n; i++)
      if (PyTuple_GetItem(names, i) != PyTuple_GetItem(names_, i)) return false;
    return true;
  }

  void learn(PyObject* names) {
    targets_.clear();
    Py_XDECREF(names_);
    names_ = nullptr;
    std::vector<bool> seen(tree_.size());
    std::vector<Target> targets;
    const Py_ssize_t n = names ? PyTuple_Size(names) : 0;
    targets.reserve(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; i++) targets.push_back(target_of(PyTuple_GetItem(names, i), seen));
    for (size_t k = 0; k < seen.size(); k++)
      if (!seen[k]) throw_names(tree_, "", "missing", text_of(tree_[k].name));
    targets_ = std::move(targets);
    Py_XINCREF(names);
    names_ = names;
  }

  Target target_of(PyObject* name, std::vector<bool>& seen) const {
    for (size_t k = 0; k < tree_.size(); k++)
      if (tree_[k].name == name || PyUnicode_Compare(tree_[k].name, name) == 0) {
        seen[k] = true;
        return {&tree_[k], 0};
      }
    for (int i = 0; i < 2; i++)
      if (options_[i] && PyUnicode_CompareWithASCIIString(name, options_[i]) == 0) return {nullptr, i};
    throw_names(tree_, "", "unknown", text_of(name), about_next(text_of(name)));
  }

  // What to do instead of giving a next observation.
  std::string about_next(const std::string& name) const {
    constexpr size_t kPrefix = 5;
    if (!observed_ || !name.starts_with("next_")) return "";
    const std::string own = name.substr(kPrefix);
    if (std::ranges::none_of(*observed_, [&](const Node& n) { return text_of(n.name) == own; })) return "";
    return ". The view links rows: '" + own + "' takes the new observation, which env.step() returned, and '" + name +
           "' is made when a batch is drawn";
  }

  std::vector<Node> tree_;
  const char* options_[2];
  const std::vector<Node>* observed_;
  PyObject* names_ = nullptr;
  std::vector<Target> targets_;
  std::vector<Ref> held_;  // nested values
};

}  // namespace torchreplay::py
