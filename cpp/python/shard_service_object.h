// `_C.ShardService`: what a shard answers the learners of other nodes.
#pragma once

#include "client/shard_service.h"
#include "python/segment_object.h"

namespace torchreplay::py {

struct ShardServiceObject {
  Ref segment;  // None: another answers all. It may be closed
  std::shared_ptr<ShardService> service;
};

namespace shard_service {

using Object = ShardServiceObject;

// ShardService(segment, number, largest_batch): of a shard of that number. None answers nothing itself.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject* segment;
    long long number, largest_batch;
    if (!PyArg_ParseTuple(args, "OLL", &segment, &number, &largest_batch)) throw PythonError{};
    auto state = std::make_unique<Object>();
    state->segment = Ref::borrow(segment);
    std::shared_ptr<Learner> learner;
    std::vector<uint64_t> item_bytes;
    if (segment != Py_None) {
      const auto& s = state_of<SegmentObject>(segment);
      const std::shared_ptr<AttachedSegment> attached = s.attached();
      learner = s.learner;
      const Fields& outputs = attached->outputs();
      if (outputs.ragged.empty() && !attached->has_versions())
        for (const FieldSpec& spec : outputs.specs) item_bytes.push_back(spec.nbytes);
    }
    state->service = std::make_shared<ShardService>(std::move(learner), std::move(item_bytes), number, largest_batch);
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// serve(socket) -> (items, largest, keys and TD errors or None): answers the requests over a connection, up to one that
// somebody else has to answer. None: the connection has ended.
inline PyObject* serve(PyObject* self, PyObject* number) {
  return method<Object>(self, [&](Object& s) {
    const std::shared_ptr<ShardService> service = s.service;
    const Ref segment = Ref::borrow(s.segment.get());
    const auto socket = static_cast<int>(as_int(number));
    try {
      const ShardCall call = service->serve(socket, [&](uint32_t items) {
        return threads_for(state_of<SegmentObject>(segment.get()).attached()->outputs(), items);
      });
      PyErr_Clear();  // of what failed within the draw: whoever does it again meets it, too
      if (!call.is_feedback) return checked(Py_BuildValue("IdO", unsigned{call.items}, call.largest, Py_None));
      const auto nbytes = static_cast<Py_ssize_t>(call.feedback.keys.size() * sizeof(int64_t));
      static_assert(sizeof(int64_t) == sizeof(double));
      const auto* keys = nbytes ? reinterpret_cast<const char*>(call.feedback.keys.data()) : "";
      const auto* td = nbytes ? reinterpret_cast<const char*>(call.feedback.td.data()) : "";
      return checked(Py_BuildValue("Id(y#y#)", unsigned{call.items}, call.largest, keys, nbytes, td, nbytes));
    } catch (const LinkEnded&) {
      return Py_NewRef(Py_None);
    }
  });
}

// renumber(number): the shard has another one, from the next draw on.
inline PyObject* renumber(PyObject* self, PyObject* number) {
  return method<Object>(self, [&](Object& s) { s.service->renumber(as_int(number)); });
}

inline PyMethodDef methods[] = {
    {"serve", serve, METH_O, nullptr}, {"renumber", renumber, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Object>)},
                              {Py_tp_methods, methods},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<Object>("torchreplay._C.ShardService", slots);

}  // namespace shard_service
}  // namespace torchreplay::py
