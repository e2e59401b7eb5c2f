// What a segment is and holds: its description, its memory as tensors, the place in its stream of draws.
#pragma once

#include "python/attached_segment.h"

namespace torchreplay::py::segment {

// From (min_size, ratio, min_diff, max_diff, tolerance or 0[, batch_size, max_age]): the last two of an admission.
inline LimiterConfig parse_limiter(PyObject* tuple) {
  LimiterConfig c;
  unsigned long long min_size, batch_size = 0, max_age = 0;
  if (!PyArg_ParseTuple(tuple, "Kdddd|KK", &min_size, &c.ratio, &c.min_diff, &c.max_diff, &c.tolerance, &batch_size,
                        &max_age))
    throw PythonError{};
  c.min_size = min_size;
  c.batch_size = batch_size;
  c.max_age = max_age;
  return c;
}

// (min_size, ratio, tolerance or 0, batch_size or 0, max_age).
inline PyObject* told(const LimiterConfig& c) {
  return checked(Py_BuildValue("KddKK", static_cast<unsigned long long>(c.min_size), c.ratio, c.tolerance,
                               static_cast<unsigned long long>(c.batch_size),
                               static_cast<unsigned long long>(c.max_age)));
}

// column(i) -> tensor [capacity, *shape] over the segment itself; -1: leaves, float32 [capacity]; -2: key + 1 of each
// slot, int64; -3: the word of each slot's row, int64.
inline PyObject* column(PyObject* self, PyObject* index) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    const int64_t i = as_int(index);  // may run code that closes the segment
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    SegmentMemory& m = attached->memory();
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
    if (spec.ragged()) throw std::invalid_argument("no such column: values of any length lie in pages");
    const Field& f = m.layout().fields[spec.column];
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

template <class Change>
int change(PyObject* self, PyObject* value, const char* name, Change&& change) {
  return as_status(method<SegmentObject>(self, [&](SegmentObject& s) {
    if (!value) throw std::invalid_argument(std::string(name) + " cannot be deleted");
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    change(s, *attached);
  }));
}

// What messages call it from now on, in this process.
inline int set_called(PyObject* self, PyObject* value, void*) {
  return change(self, value, "what it is called",
                [&](SegmentObject&, AttachedSegment& a) { a.memory().call(text_of(value)); });
}
inline int set_step(PyObject* self, PyObject* value, void*) {
  return change(self, value, "step", [&](SegmentObject& s, AttachedSegment&) { s.learner->set_step(as_uint(value)); });
}
inline int set_stream(PyObject* self, PyObject* value, void*) {
  return change(self, value, "stream", [&](SegmentObject& s, AttachedSegment&) {
    s.learner->set_stream(static_cast<uint32_t>(as_uint(value)));
  });
}

// A descriptor that others may attach by until close(), or close_attach_fd().
inline int attach_fd(SegmentObject& s) {
  if (s.attach_fd.get() < 0) {
    s.attach_fd = Descriptor::duplicate(s.attached()->memory().fd());
    s.attach_fd.keep();
  }
  return s.attach_fd.require_own();
}

// (stream, step): where the draws of this process go on, which need not be a learner.
inline PyObject* draws_go_on(SegmentObject& s) {
  const DrawName next = s.learner->position();
  return checked(Py_BuildValue("IK", static_cast<unsigned int>(next.stream), next.step));
}

inline int set_policy_version(PyObject* self, PyObject* value, void*) {
  return change(self, value, "policy_version",
                [&](SegmentObject&, AttachedSegment& a) { a.set_policy_version(as_int(value)); });
}

using Object = SegmentObject;
inline PyGetSetDef getset[] = {
    {"stopped", segment_attribute<[](Attachment& a) { return a.stopped(); }>, nullptr, nullptr, nullptr},
    {"closed", attribute<Object, [](Object& s) { return !s.segment; }>, nullptr, nullptr, nullptr},
    {"learning", attribute<Object, [](Object& s) { return s.learner->held(); }>, nullptr, nullptr, nullptr},
    {"text", segment_attribute<[](Attachment& a) { return a.memory().text(); }>, nullptr, nullptr, nullptr},
    {"called", segment_attribute<[](Attachment& a) { return a.memory().called(); }>, set_called, nullptr, nullptr},
    {"fd", segment_attribute<[](Attachment& a) { return a.memory().fd(); }>, nullptr, nullptr, nullptr},
    {"attach_fd", attribute<Object, [](Object& s) { return attach_fd(s); }>, nullptr, nullptr, nullptr},
    {"nbytes", segment_attribute<[](Attachment& a) { return a.memory().layout().bytes; }>, nullptr, nullptr, nullptr},
    {"layout_hash", segment_attribute<[](Attachment& a) { return a.layout_hash(); }>, nullptr, nullptr, nullptr},
    {"stream", attribute<Object, [](Object& s) { return s.learner->stream(); }>, set_stream, nullptr, nullptr},
    {"step", attribute<Object, [](Object& s) { return s.attached(), s.learner->step(); }>, set_step, nullptr, nullptr},
    {"draws_go_on", attribute<Object, [](Object& s) { return draws_go_on(s); }>, nullptr, nullptr, nullptr},
    {"draws", segment_attribute<[](Attachment& a) { return a.draws(); }>, nullptr, nullptr, nullptr},
    {"head", segment_attribute<[](Attachment& a) { return a.head(); }>, nullptr, nullptr, nullptr},
    {"seed", segment_attribute<[](Attachment& a) { return a.seed(); }>, nullptr, nullptr, nullptr},
    {"rewrites", segment_attribute<[](Attachment& a) { return a.rewrites(); }>, nullptr, nullptr, nullptr},
    {"imports", segment_attribute<[](Attachment& a) { return a.imports(); }>, nullptr, nullptr, nullptr},
    {"presence", segment_attribute<[](Attachment& a) { return uint64_t{a.memory().presence()}; }>, nullptr, nullptr,
     nullptr},
    {"limiter", segment_attribute<[](Attachment& a) { return told(a.limiter()); }>, nullptr, nullptr, nullptr},
    {"expired_items", segment_attribute<[](Attachment& a) { return a.memory().header().expired_items; }>, nullptr,
     nullptr, nullptr},
    {"policy_version", segment_attribute<[](Attachment& a) { return a.policy_version(); }>, set_policy_version, nullptr,
     nullptr},
    {"in_file", segment_attribute<[](Attachment& a) { return a.memory().file().phase != Phase::kMemory; }>, nullptr,
     nullptr, nullptr},
    {"address", segment_attribute<[](Attachment& a) { return reinterpret_cast<uintptr_t>(a.memory().base()); }>,
     nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace torchreplay::py::segment
