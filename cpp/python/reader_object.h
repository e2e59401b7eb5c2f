// `_C.Reader`: a segment of other processes, looked at without taking part.
#pragma once

#include "python/properties.h"
#include "python/queue_calls.h"
#include "python/regions.h"
#include "python/stats.h"
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

// [(id, role, alive, waiting, pid, rows, since_write, since_draw)].
inline Ref participants_of(const SegmentFacts& f) {
  return segment::list_of(f.participants, [&](const ParticipantFacts& p) {
    return Py_BuildValue("(isOOiKdd)", p.id, name_of(p.role), p.alive ? Py_True : Py_False,
                         p.waiting ? Py_True : Py_False, p.pid, static_cast<unsigned long long>(p.rows),
                         ago(p.last_write, f.now), ago(p.last_draw, f.now));
  });
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
  d.put<"evicted_by_pages">(f.evicted_by_pages);
  d.put<"draws">(f.draws);
  d.put<"redraws">(f.redraws);
  d.put<"dropped_rows">(f.dropped_rows);
  d.put<"drawable">(f.drawable);
  d.put<"policy_version">(f.policy_version);
  d.put<"ages">(static_cast<int64_t>(f.ages));
  d.put<"aged">(f.aged);
  d.put<"age_max">(f.largest_age);
  d.put<"expired_items">(f.expired_items);
  d.put<"admitted_items">(f.admitted_items);
  d.put<"admission_limit">(f.admission_limit);
  d.put<"open_admissions">(f.open_admissions);
  d.put<"ragged_fill">(f.ragged_fill);
}

// facts() -> dict: what the segment has counted, and who takes part. Times are in seconds.
inline PyObject* facts(PyObject* self, PyObject*) {
  return guarded([&] {
    const SegmentFacts f = state_of<ReaderObject>(self).reader().facts();
    segment::DictBuilder d;
    put_counts(d, f);
    d.put<"time">(static_cast<double>(f.now) * 1e-9);
    d.put<"age">(ago(f.made, f.now));
    d.put<"insert_wait">(seconds(f.insert_wait_ns));
    d.put<"sample_wait">(seconds(f.sample_wait_ns));
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

// queue() -> dict: what a queue's tables say; `holders` is a list of (pid, items, alive). None of what is no queue.
inline PyObject* queue(PyObject* self, PyObject*) {
  return guarded([&] {
    const SegmentReader& r = state_of<ReaderObject>(self).reader();
    if (!r.layout().view.claimed) return Py_NewRef(Py_None);
    const QueueTables tables(r.base(), r.layout());
    const OldestNeed oldest = tables.oldest_need();
    const QueueTables::Depth depth = tables.depth();
    const Ref holders = segment::list_of(tables.holders(), [&](const ItemHolder& h) {
      return Py_BuildValue("iKO", h.pid, static_cast<unsigned long long>(h.items),
                           r.is_present(h.presence) ? Py_True : Py_False);
    });
    return checked(Py_BuildValue(
        "{sKsKsKsKsdsIsisO}", "used", tables.in_use(), "to_draw", depth.to_draw, "held_items", tables.held(),
        "dropped_items", tables.dropped(), "oldest_age", depth.oldest_age ? 1e-3 * *depth.oldest_age : -1.0, "need",
        static_cast<unsigned>(oldest.need), "needed_pid", oldest.pid, "holders", holders.get()));
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

inline PyMethodDef methods[] = {
    {"facts", facts, METH_NOARGS, nullptr},
    {"queue", queue, METH_NOARGS, nullptr},
    {"copy_slots", copy_slots, METH_VARARGS, nullptr},
    {"close", plain_method<ReaderObject, [](ReaderObject& s) { s.segment.reset(); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
template <auto body>
PyObject* attribute_of_reader(PyObject* self, void*) {
  return method<ReaderObject>(self, [](ReaderObject& s) { return body(s.reader()); });
}

inline PyGetSetDef getset[] = {
    {"text", attribute_of_reader<[](SegmentReader& r) { return r.text(); }>, nullptr, nullptr, nullptr},
    {"nonce", attribute_of_reader<[](SegmentReader& r) { return r.nonce(); }>, nullptr, nullptr, nullptr},
    {"seed", attribute_of_reader<[](SegmentReader& r) { return r.seed(); }>, nullptr, nullptr, nullptr},
    {"format", attribute_of_reader<[](SegmentReader& r) { return r.format(); }>, nullptr, nullptr, nullptr},
    {"nbytes", attribute_of_reader<[](SegmentReader& r) { return r.layout().bytes; }>, nullptr, nullptr, nullptr},
    {"regions", attribute_of_reader<[](SegmentReader& r) { return regions_of(r.layout()); }>, nullptr, nullptr,
     nullptr},
    // In which boot of the machine its processes used a file; 0: it lies in memory.
    {"boot", attribute_of_reader<[](SegmentReader& r) { return r.file().boot; }>, nullptr, nullptr, nullptr},
    // Whether the last process that used a file has marked it as closed.
    {"sealed", attribute_of_reader<[](SegmentReader& r) { return r.file().phase.load() == Phase::kSealed; }>, nullptr,
     nullptr, nullptr},
    {"in_use", attribute_of_reader<[](SegmentReader& r) { return r.in_use(); }>, nullptr, nullptr, nullptr},
    {"same_namespace", attribute_of_reader<[](SegmentReader& r) { return r.same_namespace(); }>, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<ReaderObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<ReaderObject>("torchreplay._C.Reader", slots);

}  // namespace reader
}  // namespace torchreplay::py
