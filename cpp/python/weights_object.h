// `_C.Weights`: the shared memory behind SharedWeights.
#pragma once

#include "python/new_tensors.h"
#include "python/object.h"
#include "segment/weights_memory.h"

namespace torchreplay::py {

struct WeightsObject {
  std::shared_ptr<WeightsMemory> memory;
};

namespace weights {

// Weights(fd, create, nonce, buffer_bytes, version=0): of new ones, which have that version.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    int fd, create;
    unsigned long long nonce, bytes, version = 0;
    if (!PyArg_ParseTuple(args, "ipKK|K", &fd, &create, &nonce, &bytes, &version)) throw PythonError{};
    install(self, new WeightsObject{
                      std::make_shared<WeightsMemory>(Descriptor::duplicate(fd), nonce, bytes, create != 0, version)});
    return Py_NewRef(Py_None);
  }));
}

inline PyObject* get_version(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(state_of<WeightsObject>(self).memory->version())); });
}
inline PyObject* get_fd(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromLong(state_of<WeightsObject>(self).memory->fd())); });
}
inline PyObject* get_publisher(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLong(state_of<WeightsObject>(self).memory->publisher())); });
}

// buffer(version) -> uint8 tensor over the buffer of that publication.
inline PyObject* buffer(PyObject* self, PyObject* version) {
  return guarded([&] {
    auto& s = state_of<WeightsObject>(self);
    const auto bytes = static_cast<int64_t>(s.memory->buffer_bytes());
    return make_tensor(s.memory->buffer(as_uint(version)), Element::kU8, 1, &bytes, nullptr, s.memory);
  });
}

// begin_publish(ns) -> bool: the caller may write buffer(version + 1) and must then call end_publish. A caller that was
// interrupted before it got an answer may call end_publish, too: end_publish(complete, as=version + 1).
inline PyObject* begin_publish(PyObject* self, PyObject* ns) {
  return guarded([&] {
    auto& s = state_of<WeightsObject>(self);
    const int64_t limit = as_int(ns);
    bool begun;
    {
      Unlocked unlocked;
      begun = s.memory->begin_publish(limit);
    }
    return PyBool_FromLong(begun);
  });
}
inline PyObject* end_publish(PyObject* self, PyObject* args) {
  return guarded([&] {
    int complete;
    unsigned long long as = 0;
    if (!PyArg_ParseTuple(args, "p|K", &complete, &as)) throw PythonError{};
    state_of<WeightsObject>(self).memory->end_publish(complete != 0, as);
    return Py_NewRef(Py_None);
  });
}
inline PyObject* intact(PyObject* self, PyObject* version) {
  return guarded([&] { return PyBool_FromLong(state_of<WeightsObject>(self).memory->intact(as_uint(version))); });
}

inline PyMethodDef methods[] = {{"buffer", buffer, METH_O, nullptr},
                                {"begin_publish", begin_publish, METH_O, nullptr},
                                {"end_publish", end_publish, METH_VARARGS, nullptr},
                                {"intact", intact, METH_O, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {{"version", get_version, nullptr, nullptr, nullptr},
                               {"publisher", get_publisher, nullptr, nullptr, nullptr},
                               {"fd", get_fd, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<WeightsObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<WeightsObject>("torchreplay._C.Weights", slots);

}  // namespace weights
}  // namespace torchreplay::py
