// The spec as the binding needs it: names, nesting, shapes; and the matching of keyword arguments to fields.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "python/array_view.h"

namespace torchreplay::py {

inline constexpr uint64_t kMaxFieldBytes = uint64_t{1} << 46;

struct FieldSpec {
  static constexpr size_t kOneSize = SIZE_MAX;

  std::string path;  // "obs/image"
  Element element;
  std::vector<int64_t> shape;  // of a ragged field: of one element of a value
  uint64_t nbytes;
  uint32_t column = 0;   // among those of one size, or the ragged ones: as the layout has them
  size_t of = kOneSize;  // of a ragged field: the field whose length its values have, which may be itself
  bool several = false;  // of a ragged output: an item has values of several rows

  bool ragged() const { return of != kOneSize; }
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

  // Those whose values have one size, in the order of the layout: the others have their values in pages.
  std::vector<size_t> fixed;
  std::vector<size_t> ragged;
  std::vector<Node> ragged_tree;  // the names that lead to ragged fields

  // What the layout is made from.
  std::vector<Field> columns() const {
    std::vector<Field> columns;
    columns.reserve(fixed.size());
    for (const size_t f : fixed) columns.push_back({specs[f].element, specs[f].nbytes});
    return columns;
  }
  std::vector<RaggedField> ragged_columns() const {
    std::vector<RaggedField> columns;
    std::vector<size_t> groups;  // the fields whose lengths are kept, in the order in which they are needed
    for (const size_t f : ragged) {
      const auto found = std::ranges::find(groups, specs[f].of);
      const auto group = static_cast<uint32_t>(found - groups.begin());
      if (found == groups.end()) groups.push_back(specs[f].of);
      columns.push_back({specs[f].element, specs[f].nbytes, group});
    }
    return columns;
  }

  // From a list of (path: tuple[str, ...], element: int, shape: tuple[int, ...]). Of ragged fields, with the position
  // of the one whose length their values have; of ragged outputs, also whether an item has values of several rows.
  static Fields parse(PyObject* list) {
    Fields f;
    const Py_ssize_t n = PyList_Size(list);
    if (n < 0) throw PythonError{};
    for (Py_ssize_t i = 0; i < n; i++) {
      PyObject *path, *shape;
      int element, of = -1, several = 0;
      if (!PyArg_ParseTuple(PyList_GetItem(list, i), "O!iO!|ip", &PyTuple_Type, &path, &element, &PyTuple_Type, &shape,
                            &of, &several))
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
      if (of >= 0) spec.of = static_cast<size_t>(of);
      spec.several = several != 0;
      std::vector<size_t>& alike = spec.ragged() ? f.ragged : f.fixed;
      spec.column = static_cast<uint32_t>(alike.size());
      alike.push_back(f.specs.size());
      f.place(path, static_cast<int>(i), spec);
      f.specs.push_back(std::move(spec));
    }
    for (const size_t r : f.ragged)
      if (const size_t of = f.specs[r].of; of >= f.specs.size() || f.specs[of].of != of)
        throw std::invalid_argument("field '" + f.specs[r].path + "' has the length of no ragged field");
    f.ragged_tree = f.pruned(f.tree, [&f](int field) { return f.specs[static_cast<size_t>(field)].ragged(); });
    return f;
  }

  // The part of a tree of names that leads to the fields for which keep(field) is true.
  template <class Keep>
  static std::vector<Node> pruned(const std::vector<Node>& tree, const Keep& keep) {
    std::vector<Node> kept;
    for (const Node& n : tree) {
      Node copy{n.name, n.field, pruned(n.children, keep)};
      if (n.field >= 0 ? keep(n.field) : !copy.children.empty()) kept.push_back(std::move(copy));
    }
    return kept;
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

// The names of a named tuple's parts, such as those of Gymnasium's GraphInstance; null for other tuples.
inline PyObject* named_parts(PyObject* tuple) {
  if (PyTuple_CheckExact(tuple)) return nullptr;
  PyObject* const names = PyObject_GetAttrString(tuple, "_fields");
  if (!names) PyErr_Clear();
  return names;
}

// Whether it is a list or a tuple of graphs: one for each row or environment, of a node that a graph has become.
inline bool holds_graphs(const Node& node, PyObject* value) {
  const bool several = PyList_CheckExact(value) || PyTuple_CheckExact(value);
  if (!several || PySequence_Size(value) == 0 || PyUnicode_CompareWithASCIIString(node.children[0].name, "0") == 0)
    return false;
  for (Py_ssize_t i = 0; i < PySequence_Size(value); i++) {
    const Ref one(checked(PySequence_GetItem(value, i)));
    if (!PyTuple_Check(one.get()) || !Ref(named_parts(one.get()))) return false;
  }
  return true;
}

// A dict of what each of several graphs has of a name. What none of them has is no part of it.
inline Ref parts_of_graphs(const Node& node, PyObject* graphs) {
  Ref dict(checked(PyDict_New()));
  for (Py_ssize_t i = 0; i < PySequence_Size(graphs); i++) {
    const Ref graph(checked(PySequence_GetItem(graphs, i)));
    const Ref names(checked(named_parts(graph.get())));
    for (Py_ssize_t p = 0; p < PySequence_Size(names.get()); p++) {
      const Ref name(checked(PySequence_GetItem(names.get(), p))), part(checked(PySequence_GetItem(graph.get(), p)));
      const bool is_field =
          std::ranges::any_of(node.children, [&](const Node& n) { return PyUnicode_Compare(n.name, name.get()) == 0; });
      if (part.get() == Py_None && !is_field) continue;
      if (!PyDict_Contains(dict.get(), name.get())) {
        const Ref parts(checked(PyList_New(0)));
        if (PyDict_SetItem(dict.get(), name.get(), parts.get())) throw PythonError{};
      }
      const Ref none(checked(PyTuple_New(0)));
      PyObject* const own = part.get() == Py_None ? none.get() : part.get();
      if (PyList_Append(PyDict_GetItem(dict.get(), name.get()), own)) throw PythonError{};
    }
  }
  return dict;
}

// The values of a nested node: a dict, the tuple that a Tuple space makes when the names are "0", "1", ..., or graphs.
inline void collect_nested(const Node& node, PyObject* value, const std::string& path, PyObject** values,
                           std::vector<Ref>& held) {
  if (PyDict_Check(value)) return collect(node.children, value, path + "/", values, held);
  if (holds_graphs(node, value)) {
    const Ref parts = parts_of_graphs(node, value);
    return collect(node.children, parts.get(), path + "/", values, held);
  }
  if (!PyTuple_Check(value))
    throw std::invalid_argument("field '" + path + "' is nested: expected a dict, got " + type_text(value) +
                                (PyObject_HasAttrString(value, "to_dict") ? ": pass its .to_dict()" : ""));
  Ref dict(checked(PyDict_New()));
  const Ref names(named_parts(value));
  for (Py_ssize_t i = 0; i < PyTuple_Size(value); i++) {
    const Ref name(names ? checked(PySequence_GetItem(names.get(), i)) : checked(PyUnicode_FromFormat("%zd", i)));
    PyObject* const part = PyTuple_GetItem(value, i);
    if (names && part == Py_None) {  // of a graph without edges
      const Ref none(checked(PyTuple_New(0)));
      const bool is_field =
          std::ranges::any_of(node.children, [&](const Node& n) { return PyUnicode_Compare(n.name, name.get()) == 0; });
      if (is_field && PyDict_SetItem(dict.get(), name.get(), none.get())) throw PythonError{};
    } else if (PyDict_SetItem(dict.get(), name.get(), part)) {
      throw PythonError{};
    }
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

// Matches the keyword arguments of one call to names of the spec. A call site passes the same tuple of names every
// time, so the last matching is kept.
class KeywordMatcher {
 public:
  static constexpr int kOptions = 3;

  // `options` that are not null are keywords beside the fields. `observed`: the fields of which next ones are made when
  // a batch is drawn; they outlive the matcher. `filled`: the field that need not be given; -1: none.
  explicit KeywordMatcher(std::vector<Node> tree, std::array<const char*, kOptions> options = {},
                          const std::vector<Node>* observed = nullptr, int filled = -1)
      : tree_(std::move(tree)), options_(options), observed_(observed), filled_(filled) {}
  ~KeywordMatcher() { Py_XDECREF(names_); }
  KeywordMatcher(const KeywordMatcher&) = delete;

  // Fills `values` (one per field, nullptr for one that is filled and not given) and `options` (nullptr when not
  // given), which live until release().
  void match(PyObject* const* args, PyObject* names, PyObject** values, PyObject** options) {
    if (filled_ >= 0) values[filled_] = nullptr;
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
      if (!seen[k] && (tree_[k].field < 0 || tree_[k].field != filled_))
        throw_names(tree_, "", "missing", text_of(tree_[k].name));
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
    for (int i = 0; i < kOptions; i++)
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
  std::array<const char*, kOptions> options_;
  const std::vector<Node>* observed_;
  int filled_;
  PyObject* names_ = nullptr;
  std::vector<Target> targets_;
  std::vector<Ref> held_;  // nested values
};

}  // namespace torchreplay::py
