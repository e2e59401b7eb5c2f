// Batches into memory that somebody has.
#pragma once

#include <algorithm>
#include <memory>

#include "python/attached_segment.h"

namespace torchreplay::py {

// `out=`: tensors that somebody has. Those of values of any length are another's to place.
class GivenBatch {
 public:
  // `dict` has a tensor for every output of one size, and for what a batch has beside them (`reserved`: their names).
  // Throws std::invalid_argument that names the first one that a batch of n items cannot be written to.
  GivenBatch(const Fields& fields, bool has_age, int64_t n, PyObject* dict, PyObject* const* reserved)
      : views_(fields.specs.size() + reserved_count(has_age)), has_age_(has_age), n_(n) {
    const size_t outputs = fields.specs.size();
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
      if (!v.array.data) continue;  // of values of any length
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
      if (node.field >= 0 && fields.specs[static_cast<size_t>(node.field)].ragged()) continue;
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

// Memory that somebody has for the values of any length of a batch. A draw finds out whether it is enough.
class GivenRoom {
 public:
  // `room` has `block`, uint8 [bytes], which the caller keeps as it is, and `limits` as for set_budget(), or None.
  GivenRoom(const Fields& outputs, const RaggedPlan& plan, PyObject* room)
      : outputs_(outputs), plan_(plan), room_(Ref::borrow(room)), ragged_(plan) {
    const Ref block(attribute(room, "block")), limits(attribute(room, "limits"));
    const bool bytes = view_.open(block.get()) && view_.array.element == Element::kU8 && view_.array.dims == 1;
    if (!bytes || !is_dense(view_.array, 0))
      throw std::invalid_argument("the block of a room is no contiguous tensor of uint8");
    if (view_.array.shape[0]) ragged_.given = const_cast<char*>(view_.array.data);
    ragged_.given_bytes = static_cast<uint64_t>(view_.array.shape[0]);
    if (limits.get() != Py_None) set_budget(&ragged_, plan, limits.get());
  }

  RaggedBatch* ragged() { return &ragged_; }

  // After the draw. Sets `room.drawn`: (items, bytes used, places of each ragged output, None, or where the room was
  // too small a block that has them). Places: (where values begin, elements, where offsets and lengths begin, values of
  // an item: 0 where it has one and no dimension for it).
  void tell() {
    if (std::exchange(told_, true)) return;
    const RaggedPlan::Window& window = plan_.windows[plan_.groups.front().window];
    const int64_t items = ragged_.lengths.front().count / int64_t{window.count};
    const Ref places(checked(PyList_New(0)));
    for (size_t o = 0; o < plan_.outputs.size(); o++) {
      const RaggedPlan::Group& group = plan_.groups[plan_.outputs[o].group];
      const RaggedBatch::Lengths& bounds = ragged_.lengths[plan_.outputs[o].group];
      const bool several = outputs_.specs[outputs_.ragged[o]].several;
      const Ref place(checked(Py_BuildValue("LLLLI", at(ragged_.values[o].data),
                                            static_cast<long long>(ragged_.values[o].elements), at(bounds.offsets),
                                            at(bounds.lengths), several ? plan_.windows[group.window].count : 0)));
      if (PyList_Append(places.get(), place.get())) throw PythonError{};
    }
    const auto bytes = static_cast<int64_t>(ragged_.bytes());
    const Ref block(ragged_.is_given()
                        ? Py_NewRef(Py_None)
                        : make_tensor(ragged_.data(), Element::kU8, 1, &bytes, nullptr, BlockOwner(ragged_.share())));
    const Ref drawn(checked(Py_BuildValue("LLOO", static_cast<long long>(items), static_cast<long long>(bytes),
                                          places.get(), block.get())));
    if (PyObject_SetAttrString(room_.get(), "drawn", drawn.get())) throw PythonError{};
  }

 private:
  static PyObject* attribute(PyObject* object, const char* name) {
    return checked(PyObject_GetAttrString(object, name));
  }
  long long at(const void* place) const { return static_cast<const char*>(place) - ragged_.data(); }

  const Fields& outputs_;
  const RaggedPlan& plan_;
  Ref room_;
  ArrayView view_;
  RaggedBatch ragged_;
  bool told_ = false;
};

}  // namespace torchreplay::py
