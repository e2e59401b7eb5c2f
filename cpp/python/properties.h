// What a segment is and holds: its description, its memory as tensors, the place in its stream of draws.
#pragma once

#include "python/attached_segment.h"

namespace torchreplay::py::segment {

// column(i) -> tensor [capacity, *shape] over the segment itself; -1: leaves, float32 [capacity]; -2: key + 1 of each
// slot, int64; -3: the word of each slot's row, int64.
inline PyObject* column(PyObject* self, PyObject* index) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    const int64_t i = as_int(index);  // may run code that closes the segment
    SegmentMemory& m = s.memory();
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    attached->settle_feedback();
    int64_t shape[StridedArray::kMaxDims + 1] = {static_cast<int64_t>(m.capacity())},
                                           strides[StridedArray::kMaxDims + 1];
    strides[0] = 1;
    if (i == -1) return make_tensor(m.tree().leaves(), Element::kF32, 1, shape, strides, attached);
    if (i == -2) return make_tensor(&m.at(0), Element::kI64, 1, shape, strides, attached);
    if (i == -3) {
      strides[0] = static_cast<int64_t>(m.layout().record_stride / sizeof(uint64_t));
      return make_tensor(&m.row(0).word, Element::kI64, 1, shape, strides, attached);
    }
    if (i < 0 || i >= static_cast<int64_t>(attached->fields.specs.size()))
      throw std::invalid_argument("no such column");
    const FieldSpec& spec = attached->fields.specs[i];
    const Field& f = m.layout().fields[i];
    const int dims = 1 + static_cast<int>(spec.shape.size());
    std::copy(spec.shape.begin(), spec.shape.end(), shape + 1);
    strides[0] = static_cast<int64_t>(f.stride) / item_size(f.element);
    int64_t dense = 1;
    for (int d = dims - 1; d >= 1; d--) {
      strides[d] = dense;
      dense *= shape[d];
    }
    return make_tensor(m.value(f, 0), f.element, dims, shape, strides, attached);
  });
}

inline PyObject* get_closed(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(!state_of<SegmentObject>(self).attached); });
}
// Whether this process counts as a learner.
inline PyObject* get_learning(PyObject* self, void*) {
  return guarded([&] {
    const auto& s = state_of<SegmentObject>(self);
    return PyBool_FromLong(s.learner && s.learner->held());
  });
}
inline PyObject* get_in_file(PyObject* self, void*) {
  return guarded(
      [&] { return PyBool_FromLong(state_of<SegmentObject>(self).memory().file().phase != Phase::kMemory); });
}
inline PyObject* get_text(PyObject* self, void*) {
  return guarded([&] {
    const std::string& text = state_of<SegmentObject>(self).memory().text();
    return checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
  });
}
inline PyObject* get_called(PyObject* self, void*) {
  return guarded(
      [&] { return checked(PyUnicode_FromString(state_of<SegmentObject>(self).memory().called().c_str())); });
}
// What messages call it from now on, in this process.
inline int set_called(PyObject* self, PyObject* value, void*) {
  return as_status(guarded([&] {
    if (!value) throw std::invalid_argument("what it is called cannot be deleted");
    state_of<SegmentObject>(self).memory().call(text_of(value));
    return Py_NewRef(Py_None);
  }));
}
inline PyObject* get_fd(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromLong(state_of<SegmentObject>(self).memory().fd())); });
}
// A descriptor that others may attach by until close(), or close_attach_fd().
inline PyObject* get_attach_fd(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    if (s.attach_fd.get() < 0) {
      s.attach_fd = Descriptor::duplicate(s.memory().fd());
      s.attach_fd.keep();
    }
    return checked(PyLong_FromLong(s.attach_fd.require_own()));
  });
}
inline PyObject* get_bytes(PyObject* self, void*) {
  return guarded(
      [&] { return checked(PyLong_FromUnsignedLongLong(state_of<SegmentObject>(self).memory().layout().bytes)); });
}
inline PyObject* get_address(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromVoidPtr(state_of<SegmentObject>(self).memory().base())); });
}
inline PyObject* get_layout_hash(PyObject* self, void*) {
  return guarded(
      [&] { return checked(PyLong_FromUnsignedLongLong(state_of<SegmentObject>(self).header().layout_hash)); });
}
inline PyObject* get_imports(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(state_of<SegmentObject>(self).header().imports)); });
}
inline PyObject* get_seed(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(state_of<SegmentObject>(self).header().seed)); });
}
inline PyObject* get_draws(PyObject* self, void*) {
  return guarded([&] {
    return checked(
        PyLong_FromUnsignedLongLong(state_of<SegmentObject>(self).header().draws.load(std::memory_order_relaxed)));
  });
}
inline PyObject* get_head(PyObject* self, void*) {
  return guarded([&] {
    return checked(
        PyLong_FromUnsignedLongLong(state_of<SegmentObject>(self).header().head.load(std::memory_order_relaxed)));
  });
}
inline PyObject* get_step(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    s.memory();
    return checked(PyLong_FromUnsignedLongLong(s.next_draw.step - s.ahead));
  });
}
inline int set_step(PyObject* self, PyObject* value, void*) {
  return as_status(guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    if (!value) throw std::invalid_argument("step cannot be deleted");
    s.become_learner();  // or the first draw would start the stream over
    s.next_draw.step = as_uint(value) + s.ahead;
    return Py_NewRef(Py_None);
  }));
}

// draws_go_on -> (stream, step): where those of this process do, which need not be a learner.
inline PyObject* get_draws_go_on(PyObject* self, void*) {
  return guarded([&] {
    const DrawName next = state_of<SegmentObject>(self).draws_go_on();
    return checked(Py_BuildValue("IK", static_cast<unsigned int>(next.stream), next.step));
  });
}

inline PyObject* get_stream(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    s.memory();
    s.become_learner();
    return checked(PyLong_FromUnsignedLong(s.next_draw.stream));
  });
}
inline int set_stream(PyObject* self, PyObject* value, void*) {
  return as_status(guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    if (!value) throw std::invalid_argument("stream cannot be deleted");
    s.become_learner();
    s.next_draw.stream = static_cast<uint32_t>(as_uint(value));
    return Py_NewRef(Py_None);
  }));
}

}  // namespace torchreplay::py::segment
