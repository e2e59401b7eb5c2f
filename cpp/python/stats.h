// The figures of a segment: who takes part, what was done, who waited.
#pragma once

#include "python/attached_segment.h"

namespace torchreplay::py::segment {

// census(unused_count_as_others) -> dict of counts. Frees what dead participants left behind on its way.
inline PyObject* census(PyObject* self, PyObject* flag) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    Header& h = s.header();
    const Census c = take_census(s.memory(), as_bool(flag));
    const int64_t now = machine_ns(), left = h.last_departure.load(std::memory_order_relaxed);
    return checked(Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:O,s:d,s:d}", "writers", c.writers, "learners",
                                 c.learners, "supervisors", c.supervisors, "owners", c.owners, "others_writing",
                                 c.others_writing, "others_learning", c.others_learning, "others_owning",
                                 c.others_owning, "waiting", c.waiting, "shared",
                                 h.shared.load(std::memory_order_relaxed) ? Py_True : Py_False, "since_departure",
                                 left ? static_cast<double>(now - left) * 1e-9 : -1.0, "since_write",
                                 c.last_write ? static_cast<double>(now - c.last_write) * 1e-9 : -1.0));
  });
}

// A string literal as an argument of a template.
template <size_t n>
struct Literal {
  consteval Literal(const char (&from)[n]) { std::copy(from, from + n, text); }
  char text[n];
};

// A dict that is filled entry by entry, each name being made once: three times as fast as Py_BuildValue.
class DictBuilder {
 public:
  template <Literal name>
  void put(uint64_t value) {
    set<name>(PyLong_FromUnsignedLongLong(value));
  }
  template <Literal name>
  void put(double value) {
    set<name>(PyFloat_FromDouble(value));
  }
  template <Literal name>
  void put(bool value) {
    set<name>(PyBool_FromLong(value));
  }
  PyObject* release() { return dict_.release(); }

 private:
  template <Literal name>
  void set(PyObject* owned) {
    static PyObject* const key = interned(name.text);
    const Ref value(checked(owned));
    if (PyDict_SetItem(dict_.get(), key, value.get())) throw PythonError{};
  }

  Ref dict_{checked(PyDict_New())};
};

// What lies under the mutex.
inline void put_guarded(DictBuilder& d, SegmentMemory& m) {
  uint64_t rows, inserted, sampled, updated, stale, unready, drawable, evicted_unsampled;
  double total, min, max_raw, change;
  {
    const WithoutGil unlocked;
    SegmentLock lock(m);
    lock.absorb();
    publish_limit(m);
    const Header& h = m.header();
    const PriorityTree tree = m.tree();
    rows = h.rows, inserted = h.inserted, sampled = h.sampled, updated = h.updated, stale = h.stale_updates,
    unready = h.unready_updates, evicted_unsampled = h.evicted_unsampled, change = h.priority_change,
    drawable = static_cast<uint64_t>(tree.count()), max_raw = h.max_raw;
    total = static_cast<double>(tree.total()) * tree.unit();
    min = drawable ? tree.min() : 0.0;
  }
  d.put<"size">(rows);
  d.put<"drawable">(drawable);
  d.put<"inserted">(inserted);
  d.put<"sampled">(sampled);
  d.put<"updated">(updated);
  d.put<"stale_updates">(stale);
  d.put<"unready_updates">(unready);
  d.put<"samples_per_insert">(static_cast<double>(sampled) / static_cast<double>(std::max<uint64_t>(1, inserted)));
  d.put<"evicted_unsampled">(evicted_unsampled);
  d.put<"priority_change">(change / static_cast<double>(std::max<uint64_t>(1, updated)));
  d.put<"priority_total">(total);
  d.put<"smallest_leaf">(min);
  d.put<"priority_max">(max_raw);
}

inline double seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

// How much of the time `elapsed` each of `many` has waited, on average.
inline double wait_share(uint64_t waited, int64_t elapsed, int many) {
  return std::min(1.0, static_cast<double>(waited) / (static_cast<double>(elapsed) * std::max(1, many)));
}

// Participants, and how long they have waited.
inline void put_participants(DictBuilder& d, SegmentMemory& m) {
  const Census c = take_census(m, false);
  const Header& h = m.header();
  const int64_t now = machine_ns();
  const int64_t recent = std::max<int64_t>(1, now - WaitTime::since(now, h.made));
  d.put<"writers">(static_cast<uint64_t>(c.writers));
  d.put<"learners">(static_cast<uint64_t>(c.learners));
  d.put<"last_write_age">(c.last_write ? static_cast<double>(now - c.last_write) * 1e-9 : -1.0);
  d.put<"insert_wait">(seconds(h.insert_wait.total_ns()));
  d.put<"sample_wait">(seconds(h.sample_wait.total_ns()));
  d.put<"insert_wait_share">(wait_share(h.insert_wait.recent_ns(now), recent, c.writers));
  d.put<"sample_wait_share">(wait_share(h.sample_wait.recent_ns(now), recent, c.learners));
}

// stats() -> dict: the fields of torchreplay.Stats, absorbed to now.
inline PyObject* stats(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    SegmentMemory& m = s.memory();
    const Header& h = m.header();
    attached->settle_feedback();
    DictBuilder d;
    put_guarded(d, m);
    put_participants(d, m);
    d.put<"capacity">(m.capacity());
    d.put<"nbytes">(m.layout().bytes);
    d.put<"draws">(h.draws.load(std::memory_order_relaxed));
    d.put<"redraws">(h.redraws.load(std::memory_order_relaxed));
    d.put<"staleness">(static_cast<double>(h.missed.load(std::memory_order_relaxed)) /
                       static_cast<double>(std::max<uint64_t>(1, h.taken_ahead.load(std::memory_order_relaxed))));
    d.put<"dropped_rows">(m.file().dropped_rows.load(std::memory_order_relaxed));
    d.put<"rows_written">(h.head.load(std::memory_order_relaxed));
    d.put<"stopped">(h.stopped.load(std::memory_order_relaxed) != 0);
    return d.release();
  });
}

}  // namespace torchreplay::py::segment
