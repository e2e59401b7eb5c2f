// Fault points for tests in Python: functions that only a build with -DTORCHREPLAY_FAULTS has.
#pragma once

#include "system/fault.h"

#ifdef TORCHREPLAY_FAULTS
#include "python/errors.h"

namespace torchreplay::py {

// fault_points() -> {name: how often this process came there since it was armed, or since the start}
inline PyObject* fault_points(PyObject*, PyObject*) {
  return guarded([&] {
    Ref points(checked(PyDict_New()));
    fault::Point::each([&](const fault::Point& p) {
      Ref reached(checked(PyLong_FromUnsignedLongLong(p.reached())));
      if (PyDict_SetItemString(points.get(), p.name(), reached.get())) throw PythonError{};
    });
    return points.release();
  });
}

// arm_fault(name, nth=1, stop=False): the nth time from now that this process comes to the point it exits, or stops.
inline PyObject* arm_fault(PyObject*, PyObject* args) {
  return guarded([&] {
    const char* name;
    unsigned long long nth = 1;
    int stop = 0;
    if (!PyArg_ParseTuple(args, "s|Kp", &name, &nth, &stop)) throw PythonError{};
    fault::arm(name, nth, stop != 0);
    return Py_NewRef(Py_None);
  });
}

}  // namespace torchreplay::py
#endif
