// `out=`: a batch into tensors that somebody has.
#pragma once

#include <algorithm>

#include "python/attached_segment.h"

namespace torchreplay::py {

class GivenBatch {
 public:
  // `dict` has a tensor for every output, and for what a batch has beside them (`reserved`: their names). Throws
  // std::invalid_argument that names the first one that a batch of n items cannot be written to.
  GivenBatch(const Fields& fields, bool has_age, int64_t n, PyObject* dict, PyObject* const* reserved)
      : views_(fields.specs.size() + reserved_count(has_age)), has_age_(has_age), n_(n) {
    const size_t outputs = fields.specs.size();
    if (!fields.ragged.empty())
      throw std::invalid_argument("out cannot take the batch: '" + fields.specs[fields.ragged[0]].path +
                                  "' is Ragged, and each batch of such is of another size; leave out= out");
    open_level(fields, fields.tree, dict, "");
    for (size_t i = 0; i < reserved_count(has_age); i++)
      open(dict, reserved[i], text_of(reserved[i]), kReserved[i], {}, views_[outputs + i]);
    refuse_overlap();
    for (const FieldSpec& spec : fields.specs) bytes_ += spec.nbytes * static_cast<uint64_t>(n);
  }

  void point(BatchPointers& out) const {
    point_at(out, views_.size() - reserved_count(has_age_), has_age_, bytes_,
             [&](size_t output) { return data(output); });
  }

 private:
  // Two of them in one place would overwrite each other.
  void refuse_overlap() const {
    std::vector<std::pair<const char*, const char*>> places;
    for (const ArrayView& v : views_) {
      int64_t bytes = item_size(v.array.element);
      for (int d = 0; d < v.array.dims; d++) bytes *= v.array.shape[d];
      places.emplace_back(v.array.data, v.array.data + bytes);
    }
    std::ranges::sort(places);
    for (size_t i = 1; i < places.size(); i++)
      if (places[i].first < places[i - 1].second)
        throw std::invalid_argument("out cannot take the batch: two of its tensors share memory");
  }

  char* data(size_t output) const { return const_cast<char*>(views_[output].array.data); }

  void open_level(const Fields& fields, const std::vector<Node>& level, PyObject* dict, const std::string& above) {
    for (const Node& node : level) {
      const std::string path = above + text_of(node.name);
      if (node.field < 0) {
        PyObject* inner = PyDict_GetItemWithError(dict, node.name);
        if (!inner && PyErr_Occurred()) throw PythonError{};
        if (!inner || !PyDict_Check(inner)) refuse(path, inner ? "no dict" : "missing");
        open_level(fields, node.children, inner, path + "/");
      } else {
        const auto output = static_cast<size_t>(node.field);
        const FieldSpec& spec = fields.specs[output];
        open(dict, node.name, path, spec.element, spec.shape, views_[output]);
      }
    }
  }

  void open(PyObject* dict, PyObject* name, const std::string& path, Element element, const std::vector<int64_t>& shape,
            ArrayView& view) const {
    open_tensor(dict, name, path, view);
    require(view.array, path, element, shape);
  }

  static void open_tensor(PyObject* dict, PyObject* name, const std::string& path, ArrayView& view) {
    PyObject* tensor = PyDict_GetItemWithError(dict, name);
    if (!tensor && PyErr_Occurred()) throw PythonError{};
    if (!tensor) refuse(path, "missing");
    if (!is_tensor(tensor)) refuse(path, std::string("a ") + text_of_type(tensor));
    if (!view.open(tensor)) refuse(path, view.problem);
  }

  void require(const StridedArray& a, const std::string& path, Element element,
               const std::vector<int64_t>& shape) const {
    std::string expected = std::string(element_name(element)) + " of shape (" + std::to_string(n_) + ",";
    for (int64_t size : shape) expected += " " + std::to_string(size) + ",";
    if (!shape.empty()) expected.pop_back();
    bool fits = a.element == element && a.dims == 1 + static_cast<int>(shape.size()) && a.shape[0] == n_;
    for (size_t d = 0; fits && d < shape.size(); d++) fits = a.shape[d + 1] == shape[d];
    if (!fits) refuse(path, "not " + expected + ")");
    if (!is_dense(a, 0)) refuse(path, "not contiguous");
  }

  [[noreturn]] static void refuse(const std::string& path, const std::string& why) {
    throw std::invalid_argument("out cannot take the batch: '" + path + "' is " + why +
                                "; give a batch that sample() returned, of the same size");
  }

  static std::string text_of_type(PyObject* o) {
    const Ref name(checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(o)), "__name__")));
    return text_of(name.get());
  }

  std::vector<ArrayView> views_;
  bool has_age_;
  int64_t n_;
  uint64_t bytes_ = 0;
};

}  // namespace torchreplay::py
