// A segment as `_C` has it: what clients share, and the fields that its rows and batches are known by in Python.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "client/learner.h"
#include "python/new_tensors.h"
#include "python/object.h"

namespace torchreplay::py {

class AttachedSegment : public Attachment {
 public:
  using Attachment::Attachment;

  Fields fields;
  Fields batch;  // the tensors of a batch, when rows are linked
  RaggedPlan ragged_outputs;
  bool closed = false;  // by its buffer, while writers keep it

  // Rows say by which policy they came about.
  bool has_versions() const { return memory().layout().view.version1 != 0; }

  const Fields& outputs() const { return linked() ? batch : fields; }

  void name_fields(Fields named) {
    fields = std::move(named);
    if (!linked()) ragged_outputs = RaggedPlan::of(memory().layout(), nullptr);
  }

  // Memory for a batch of `n` items.
  BatchBuilder new_batch(int64_t n) const { return {outputs(), ragged_outputs, linked(), has_versions(), n}; }

  static std::shared_ptr<AttachedSegment> make(std::unique_ptr<SegmentMemory> memory) {
    auto attached = std::make_shared<AttachedSegment>(std::move(memory));
    std::erase_if(all(), [](const std::weak_ptr<AttachedSegment>& other) { return other.expired(); });
    all().push_back(attached);
    return attached;
  }

  // All that this process has, kept from now on: nobody releases them any more. Needs the interpreter's lock, where
  // there still is one.
  static std::vector<std::shared_ptr<AttachedSegment>> keep_all() {
    static auto* kept = new std::vector<std::shared_ptr<AttachedSegment>>;
    for (const std::weak_ptr<AttachedSegment>& weak : all())
      if (auto attached = weak.lock(); attached && !attached->released()) kept->push_back(std::move(attached));
    return *kept;
  }
  // Leaves the files among them, even where their memory is still held.
  static void leave_files(const std::vector<std::shared_ptr<AttachedSegment>>& kept) {
    for (const auto& attached : kept) leave_saying_so([&] { leave_segment(attached->memory()); });
  }

 private:
  // Of this process; guarded by the interpreter lock.
  static std::vector<std::weak_ptr<AttachedSegment>>& all() {
    static auto* attached = new std::vector<std::weak_ptr<AttachedSegment>>;  // outlives static destructors
    return *attached;
  }
};

// What `_C.Segment` holds.
struct SegmentObject {
  std::shared_ptr<AttachedSegment> segment;  // nullptr: closed
  std::shared_ptr<Learner> learner;
  Ref batch_type;  // called without arguments: an empty batch
  Ref nonce;
  Feedback feedback;     // idle memory
  Descriptor attach_fd;  // of the memory, while others may attach by it: writers may hold that, and its own, for longer

  // For as long as a call lasts, in which another thread may close it.
  std::shared_ptr<AttachedSegment> attached() const {
    if (!segment) learner->refuse_closed();
    return segment;
  }
};

// A method of `_C.Segment`: what `body` makes of the segment.
template <class Body>
PyObject* on_segment(PyObject* self, Body&& body) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    return body(*attached);
  });
}
template <auto body>
PyObject* segment_attribute(PyObject* self, void*) {
  return on_segment(self, body);
}
template <auto body>
PyObject* segment_method(PyObject* self, PyObject*) {
  return on_segment(self, body);
}

// (total, drawable, smallest, beta).
inline PyObject* as_tuple(const DrawnFrom& from) {
  const Ref total(checked(PyFloat_FromDouble(from.total))), drawable(checked(PyLong_FromLongLong(from.drawable))),
      smallest(checked(PyFloat_FromDouble(from.smallest))), beta(checked(PyFloat_FromDouble(from.beta)));
  return checked(PyTuple_Pack(4, total.get(), drawable.get(), smallest.get(), beta.get()));
}

}  // namespace torchreplay::py
