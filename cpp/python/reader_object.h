// `_C.Reader`: a segment of other processes, looked at without taking part.
#pragma once

#include "python/regions.h"
#include "python/stats.h"
#include "python/waits.h"
#include "segment/segment_reader.h"

namespace torchreplay::py {

struct ReaderObject {
  std::unique_ptr<SegmentReader> segment;

  SegmentReader& reader() {
    if (!segment) throw std::runtime_error("the reader is closed");
    return *segment;
  }
};

namespace reader {

// Reader(fd): `fd` may be open for reading only, and stays the caller's.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    int fd;
    if (!PyArg_ParseTuple(args, "i", &fd)) throw PythonError{};
    install(self, new ReaderObject{std::make_unique<SegmentReader>(Descriptor::duplicate(fd))});
    return Py_NewRef(Py_None);
  }));
}

inline const char* name_of(Role role) {
  switch (role) {
    case Role::kWriter:
      return "writer";
    case Role::kLearner:
      return "learner";
    case Role::kSupervisor:
      return "supervisor";
    case Role::kOwner:
      return "owner";
    default:
      return "other";
  }
}

// Seconds between a time of machine_ns() and `now`; -1: it never was.
inline double ago(int64_t then, int64_t now) { return then ? static_cast<double>(now - then) * 1e-9 : -1.0; }

// [(id, role, alive, waiting, pid, rows, since_write, since_draw)].
inline Ref participants_of(const SegmentFacts& f) {
  Ref list(checked(PyList_New(0)));
  for (const ParticipantFacts& p : f.participants) {
    const Ref entry(checked(Py_BuildValue(
        "(isOOiKdd)", p.id, name_of(p.role), p.alive ? Py_True : Py_False, p.waiting ? Py_True : Py_False, p.pid,
        static_cast<unsigned long long>(p.rows), ago(p.last_write, f.now), ago(p.last_draw, f.now))));
    if (PyList_Append(list.get(), entry.get())) throw PythonError{};
  }
  return list;
}

inline void put_counts(segment::DictBuilder& d, const SegmentFacts& f) {
  d.put<"head">(f.head);
  d.put<"absorbed">(f.absorbed);
  d.put<"rows">(f.rows);
  d.put<"inserted">(f.inserted);
  d.put<"sampled">(f.sampled);
  d.put<"updated">(f.updated);
  d.put<"stale_updates">(f.stale_updates);
  d.put<"unready_updates">(f.unready_updates);
  d.put<"evicted_unsampled">(f.evicted_unsampled);
  d.put<"draws">(f.draws);
  d.put<"redraws">(f.redraws);
  d.put<"dropped_rows">(f.dropped_rows);
  d.put<"drawable">(f.drawable);
}

// facts() -> dict: what the segment has counted, and who takes part. Times are in seconds.
inline PyObject* facts(PyObject* self, PyObject*) {
  return guarded([&] {
    const SegmentFacts f = state_of<ReaderObject>(self).reader().facts();
    segment::DictBuilder d;
    put_counts(d, f);
    d.put<"time">(static_cast<double>(f.now) * 1e-9);
    d.put<"age">(ago(f.made, f.now));
    d.put<"insert_wait">(segment::seconds(f.insert_wait_ns));
    d.put<"sample_wait">(segment::seconds(f.sample_wait_ns));
    d.put<"priority_max">(static_cast<double>(f.max_raw));
    d.put<"stopped">(f.stopped);
    d.put<"importing">(f.importing);
    d.put<"holder_pid">(static_cast<uint64_t>(std::max(0, f.holder_pid)));
    d.put<"since_departed_write">(ago(f.last_write, f.now));
    const Ref dict(d.release()), limiter(segment::told(f.limiter)), participants = participants_of(f);
    if (PyDict_SetItemString(dict.get(), "limiter", limiter.get()) ||
        PyDict_SetItemString(dict.get(), "participants", participants.get()))
      throw PythonError{};
    return Py_NewRef(dict.get());
  });
}

// copy_slots(first, n) -> (float32 leaves, uint64 keys + 1) of the slots from `first` on, as bytes; fewer at the end.
inline PyObject* copy_slots(PyObject* self, PyObject* args) {
  return guarded([&] {
    unsigned long long first, n;
    if (!PyArg_ParseTuple(args, "KK", &first, &n)) throw PythonError{};
    const SegmentReader& r = state_of<ReaderObject>(self).reader();
    n = std::min<unsigned long long>(n, r.layout().capacity);
    std::vector<float> leaves(n);
    std::vector<uint64_t> keys1(n);
    const auto copied = static_cast<Py_ssize_t>(r.copy_slots(first, n, leaves.data(), keys1.data()));
    return checked(Py_BuildValue("y#y#", reinterpret_cast<const char*>(leaves.data()), copied * 4,
                                 reinterpret_cast<const char*>(keys1.data()), copied * 8));
  });
}

inline PyObject* close(PyObject* self, PyObject*) {
  return guarded([&] {
    state_of<ReaderObject>(self).segment.reset();
    return Py_NewRef(Py_None);
  });
}

inline PyObject* as_number(uint64_t n) { return checked(PyLong_FromUnsignedLongLong(n)); }

inline PyObject* get_text(PyObject* self, void*) {
  return guarded([&] {
    const std::string& text = state_of<ReaderObject>(self).reader().text();
    return checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
  });
}
inline PyObject* get_nonce(PyObject* self, void*) {
  return guarded([&] { return as_number(state_of<ReaderObject>(self).reader().header().nonce); });
}
inline PyObject* get_seed(PyObject* self, void*) {
  return guarded([&] { return as_number(state_of<ReaderObject>(self).reader().header().seed); });
}
inline PyObject* get_format(PyObject* self, void*) {
  return guarded([&] { return as_number(state_of<ReaderObject>(self).reader().header().version); });
}
inline PyObject* get_bytes(PyObject* self, void*) {
  return guarded([&] { return as_number(state_of<ReaderObject>(self).reader().layout().bytes); });
}
inline PyObject* get_regions(PyObject* self, void*) {
  return guarded([&] { return regions_of(state_of<ReaderObject>(self).reader().layout()); });
}
// In which boot of the machine its processes used a file; 0: it lies in memory.
inline PyObject* get_boot(PyObject* self, void*) {
  return guarded([&] { return as_number(state_of<ReaderObject>(self).reader().file().boot); });
}
// Whether the last process that used a file has marked it as closed.
inline PyObject* get_sealed(PyObject* self, void*) {
  return guarded(
      [&] { return PyBool_FromLong(state_of<ReaderObject>(self).reader().file().phase.load() == Phase::kSealed); });
}
inline PyObject* get_in_use(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(state_of<ReaderObject>(self).reader().in_use()); });
}
inline PyObject* get_same_namespace(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(state_of<ReaderObject>(self).reader().same_namespace()); });
}

inline PyMethodDef methods[] = {{"facts", facts, METH_NOARGS, nullptr},
                                {"copy_slots", copy_slots, METH_VARARGS, nullptr},
                                {"close", close, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {{"text", get_text, nullptr, nullptr, nullptr},
                               {"nonce", get_nonce, nullptr, nullptr, nullptr},
                               {"seed", get_seed, nullptr, nullptr, nullptr},
                               {"format", get_format, nullptr, nullptr, nullptr},
                               {"nbytes", get_bytes, nullptr, nullptr, nullptr},
                               {"regions", get_regions, nullptr, nullptr, nullptr},
                               {"boot", get_boot, nullptr, nullptr, nullptr},
                               {"sealed", get_sealed, nullptr, nullptr, nullptr},
                               {"in_use", get_in_use, nullptr, nullptr, nullptr},
                               {"same_namespace", get_same_namespace, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<ReaderObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<ReaderObject>("torchreplay._C.Reader", slots);

}  // namespace reader
}  // namespace torchreplay::py
