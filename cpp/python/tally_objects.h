// `_C.DrawTally`, `_C.DrawSteps` and `_C.Round`: what a process counts of the batches that it draws from a union. A
// signal's handler comes before or after each call.
#pragma once

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <utility>

#include "client/draw_tally.h"
#include "python/object.h"

namespace torchreplay::py {

struct DrawTallyObject {
  std::shared_ptr<DrawTally> tally;
};
struct DrawStepsObject {
  std::shared_ptr<DrawSteps> steps;
};
struct RoundObject {
  CountedRound round;
};

namespace tally {

inline PyTypeObject *steps_type = nullptr, *round_type = nullptr;

template <class State, class Counts>
int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    if (!PyArg_ParseTuple(args, "")) throw PythonError{};
    install(self, new State{std::make_shared<Counts>()});
    return Py_NewRef(Py_None);
  }));
}

inline std::shared_ptr<DrawSteps> steps_of(PyObject* steps) {
  if (steps == Py_None) return nullptr;
  if (!PyObject_TypeCheck(steps, steps_type)) throw std::invalid_argument("expected DrawSteps, or None");
  return state_of<DrawStepsObject>(steps).steps;
}

// begin(n, steps) -> Round of n items, which are ordered from now on; the next of `steps`, if there are any.
inline PyObject* begin(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<DrawTallyObject>(self, [&](DrawTallyObject& s) {
    expect_args("begin", nargs, 2);
    const int n = as_count(args[0]);
    std::shared_ptr<DrawSteps> steps = steps_of(args[1]);
    Ref object(checked(PyType_GenericAlloc(round_type, 0)));
    install(object.get(), new RoundObject{CountedRound(s.tally, std::move(steps), n)});
    return object.release();
  });
}

// count(n, steps): a batch of n items is ordered and handed out.
inline PyObject* count(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<DrawTallyObject>(self, [&](DrawTallyObject& s) {
    expect_args("count", nargs, 2);
    CountedRound(s.tally, steps_of(args[1]), as_count(args[0])).hand_out();
  });
}

// restart(rule): keeps to the limiter of that number from now on.
inline PyObject* restart(PyObject* self, PyObject* rule) {
  return method<DrawTallyObject>(self, [&](DrawTallyObject& s) { s.tally->restart(as_int(rule)); });
}

inline int64_t as_items(PyObject* o) {
  const int64_t items = as_int(o);
  if (items < 0 || items > int64_t{1} << 60) throw std::invalid_argument("that is no number of items");
  return items;
}

// grant(most, until): so many items may be ordered under this limiter, until then by the caller's clock, in seconds.
inline PyObject* grant(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<DrawTallyObject>(self, [&](DrawTallyObject& s) {
    expect_args("grant", nargs, 2);
    const double until = as_double(args[1]);
    s.tally->grant(as_items(args[0]), until);
  });
}

// covers(n, now) -> whether n more items may be ordered.
inline PyObject* covers(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<DrawTallyObject>(self, [&](DrawTallyObject& s) {
    expect_args("covers", nargs, 2);
    return s.tally->covers(as_items(args[0]), as_double(args[1]));
  });
}

// keep(most): of the lease nothing beyond so many items is needed.
inline PyObject* keep(PyObject* self, PyObject* most) {
  return method<DrawTallyObject>(
      self, [&](DrawTallyObject& s) { s.tally->lease = std::min(s.tally->lease, as_items(most)); });
}

// tell(looks) -> (items, batches, counted, sampled, sampled as it was told before): to be reported. Who looks has told
// nothing.
inline PyObject* tell(PyObject* self, PyObject* looks) {
  return method<DrawTallyObject>(self, [&](DrawTallyObject& s) {
    const int only_looks = PyObject_IsTrue(looks);
    if (only_looks < 0) throw PythonError{};
    DrawTally& t = *s.tally;
    PyObject* const told = checked(Py_BuildValue("(LLLLL)", static_cast<long long>(t.items),
                                                 static_cast<long long>(t.batches), static_cast<long long>(t.counted),
                                                 static_cast<long long>(t.sampled), static_cast<long long>(t.told)));
    if (!only_looks) t.told = t.sampled;
    return told;
  });
}

inline bool is_short(DrawTallyObject& s) { return s.tally->sampled > s.tally->enough; }

template <int64_t DrawTally::* member>
int64_t counted(DrawTallyObject& s) {
  return (*s.tally).*member;
}

inline PyMethodDef tally_methods[] = {{"begin", fast(begin), METH_FASTCALL, nullptr},
                                      {"count", fast(count), METH_FASTCALL, nullptr},
                                      {"restart", restart, METH_O, nullptr},
                                      {"grant", fast(grant), METH_FASTCALL, nullptr},
                                      {"covers", fast(covers), METH_FASTCALL, nullptr},
                                      {"keep", keep, METH_O, nullptr},
                                      {"tell", tell, METH_O, nullptr},
                                      {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef tally_getset[] = {
    {"sampled", attribute<DrawTallyObject, counted<&DrawTally::sampled>>, nullptr, nullptr, nullptr},
    {"counted", attribute<DrawTallyObject, counted<&DrawTally::counted>>, nullptr, nullptr, nullptr},
    {"items", attribute<DrawTallyObject, counted<&DrawTally::items>>, nullptr, nullptr, nullptr},
    {"batches", attribute<DrawTallyObject, counted<&DrawTally::batches>>, nullptr, nullptr, nullptr},
    {"lease", attribute<DrawTallyObject, counted<&DrawTally::lease>>, nullptr, nullptr, nullptr},
    {"told", attribute<DrawTallyObject, counted<&DrawTally::told>>, nullptr, nullptr, nullptr},
    {"is_short", attribute<DrawTallyObject, is_short>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot tally_slots[] = {{Py_tp_init, reinterpret_cast<void*>(init<DrawTallyObject, DrawTally>)},
                                    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<DrawTallyObject>)},
                                    {Py_tp_methods, tally_methods},
                                    {Py_tp_getset, tally_getset},
                                    {0, nullptr}};
inline PyType_Spec tally_spec = type_spec<DrawTallyObject>("torchreplay._C.DrawTally", tally_slots);

// go_on_from(step): so many batches have been drawn.
inline PyObject* go_on_from(PyObject* self, PyObject* step) {
  return method<DrawStepsObject>(self, [&](DrawStepsObject& s) { s.steps->go_on_from(as_items(step)); });
}

inline PyMethodDef steps_methods[] = {{"go_on_from", go_on_from, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef steps_getset[] = {
    {"made", attribute<DrawStepsObject, [](DrawStepsObject& s) { return s.steps->made; }>, nullptr, nullptr, nullptr},
    {"under_way", attribute<DrawStepsObject, [](DrawStepsObject& s) { return s.steps->under_way; }>, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot steps_slots[] = {{Py_tp_init, reinterpret_cast<void*>(init<DrawStepsObject, DrawSteps>)},
                                    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<DrawStepsObject>)},
                                    {Py_tp_methods, steps_methods},
                                    {Py_tp_getset, steps_getset},
                                    {0, nullptr}};
inline PyType_Spec steps_spec = type_spec<DrawStepsObject>("torchreplay._C.DrawSteps", steps_slots);

// shorten(n): it has only so many items.
inline PyObject* shorten(PyObject* self, PyObject* n) {
  return method<RoundObject>(self, [&](RoundObject& s) {
    const int items = as_count(n);
    if (items > s.round.items()) throw std::invalid_argument("a round has no more items than it was begun with");
    s.round.shorten(items);
  });
}

inline PyMethodDef round_methods[] = {
    {"hand_out", plain_method<RoundObject, [](RoundObject& s) { s.round.hand_out(); }>, METH_NOARGS, nullptr},
    {"give_up", plain_method<RoundObject, [](RoundObject& s) { s.round.give_up(); }>, METH_NOARGS, nullptr},
    {"shorten", shorten, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef round_getset[] = {
    {"n", attribute<RoundObject, [](RoundObject& s) { return s.round.items(); }>, nullptr, nullptr, nullptr},
    {"step", attribute<RoundObject, [](RoundObject& s) { return s.round.step(); }>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot round_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc<RoundObject>)},
                                    {Py_tp_methods, round_methods},
                                    {Py_tp_getset, round_getset},
                                    {0, nullptr}};
inline PyType_Spec round_spec = type_spec<RoundObject>("torchreplay._C.Round", round_slots);

}  // namespace tally
}  // namespace torchreplay::py
