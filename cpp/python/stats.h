// The figures of a segment as dicts: who takes part, what was done, who waited.
#pragma once

#include "client/segment_stats.h"
#include "python/attached_segment.h"

namespace torchreplay::py::segment {

// A string literal as an argument of a template.
template <size_t n>
struct Literal {
  consteval Literal(const char (&from)[n]) { std::copy(from, from + n, text); }
  char text[n];
};

// A dict that is filled entry by entry, each name being made once: three times as fast as Py_BuildValue.
class DictBuilder {
 public:
  template <Literal name, class Value>
  void put(const Value& value) {
    static PyObject* const key = interned(name.text);
    const Ref owned(to_python(value));
    if (PyDict_SetItem(dict_.get(), key, owned.get())) throw PythonError{};
  }
  PyObject* release() { return dict_.release(); }

 private:
  Ref dict_{checked(PyDict_New())};
};

inline double seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

// Seconds between a time of machine_ns() and `now`; -1: it never was.
inline double ago(int64_t then, int64_t now) { return then ? static_cast<double>(now - then) * 1e-9 : -1.0; }

inline double ratio(double of, uint64_t to) { return of / static_cast<double>(std::max<uint64_t>(1, to)); }

// census(unused_count_as_others) -> dict of counts. Frees what dead participants left behind on its way.
inline PyObject* census(PyObject* self, PyObject* flag) {
  return on_segment(self, [&](AttachedSegment& segment) {
    const Census c = take_census(segment.memory(), as_bool(flag));
    DictBuilder d;
    d.put<"writers">(c.writers);
    d.put<"learners">(c.learners);
    d.put<"supervisors">(c.supervisors);
    d.put<"owners">(c.owners);
    d.put<"others_writing">(c.others_writing);
    d.put<"others_learning">(c.others_learning);
    d.put<"others_owning">(c.others_owning);
    d.put<"waiting">(c.waiting);
    d.put<"shared">(c.shared);
    d.put<"since_departure">(ago(c.last_departure, c.now));
    d.put<"since_write">(ago(c.last_write, c.now));
    return d.release();
  });
}

// stats() -> dict: the fields of torchreplay.Stats, absorbed to now.
inline PyObject* stats(PyObject* self, PyObject*) {
  return on_segment(self, [&](AttachedSegment& segment) {
    const SegmentStats s = SegmentStats::of(segment);
    DictBuilder d;
    d.put<"size">(s.rows);
    d.put<"drawable">(s.drawable);
    d.put<"inserted">(s.inserted);
    d.put<"sampled">(s.sampled);
    d.put<"updated">(s.updated);
    d.put<"stale_updates">(s.stale_updates);
    d.put<"unready_updates">(s.unready_updates);
    d.put<"samples_per_insert">(ratio(static_cast<double>(s.sampled), s.inserted));
    d.put<"evicted_unsampled">(s.evicted_unsampled);
    d.put<"held_items">(s.held_items);
    d.put<"dropped_items">(s.dropped_items);
    d.put<"oldest_age">(s.oldest_age);
    d.put<"policy_version">(s.policy_version);
    d.put<"age_mean">(s.age_mean);
    d.put<"age_max">(s.age_max);
    d.put<"expired_items">(s.expired_items);
    d.put<"admitted_items">(s.admitted_items);
    d.put<"admission_limit">(s.admission_limit);
    d.put<"open_admissions">(s.open_admissions);
    d.put<"priority_change">(ratio(s.priority_change, s.updated));
    d.put<"priority_total">(s.priority_total);
    d.put<"smallest_leaf">(s.smallest_leaf);
    d.put<"priority_max">(s.max_raw);
    d.put<"writers">(s.census.writers);
    d.put<"learners">(s.census.learners);
    d.put<"last_write_age">(ago(s.census.last_write, s.now));
    d.put<"insert_wait">(seconds(s.insert_wait));
    d.put<"sample_wait">(seconds(s.sample_wait));
    d.put<"insert_wait_share">(s.insert_wait_share);
    d.put<"sample_wait_share">(s.sample_wait_share);
    d.put<"capacity">(segment.memory().capacity());
    d.put<"nbytes">(segment.memory().layout().bytes);
    d.put<"ragged_bytes">(s.ragged_bytes);
    d.put<"ragged_fill">(s.ragged_fill);
    d.put<"evicted_by_pages">(s.evicted_by_pages);
    d.put<"draws">(s.draws);
    d.put<"redraws">(s.redraws);
    d.put<"staleness">(ratio(static_cast<double>(s.missed), s.taken_ahead));
    d.put<"dropped_rows">(s.dropped_rows);
    d.put<"rows_written">(s.head);
    d.put<"stopped">(s.stopped);
    return d.release();
  });
}

}  // namespace torchreplay::py::segment
