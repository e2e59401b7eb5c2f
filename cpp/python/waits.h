// Waits between processes: the limiter, sleeping for rows, the end of a buffer.
#pragma once

#include "python/attached_segment.h"

namespace torchreplay::py::segment {

// From (min_size, ratio, min_diff, max_diff, tolerance or 0).
inline LimiterConfig parse_limiter(PyObject* tuple) {
  LimiterConfig c;
  unsigned long long min_size;
  if (!PyArg_ParseTuple(tuple, "Kdddd", &min_size, &c.ratio, &c.min_diff, &c.max_diff, &c.tolerance))
    throw PythonError{};
  c.min_size = min_size;
  return c;
}

// (min_size, ratio, tolerance or 0).
inline PyObject* told(const LimiterConfig& c) {
  return checked(Py_BuildValue("Kdd", static_cast<unsigned long long>(c.min_size), c.ratio, c.tolerance));
}

// wait_rows(seen, ns): sleeps until a writer signals rows, at most `ns`; not at all when one has since the draw that
// said `seen`.
inline PyObject* wait_rows(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("wait_rows", nargs, 2);
    auto& s = state_of<SegmentObject>(self);
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    Header& h = s.header();
    const auto seen = static_cast<uint32_t>(as_uint(args[0]));
    const int64_t limit = as_int(args[1]);
    {
      WithoutGil unlocked;
      const int64_t start = monotonic_ns();
      futex_wait(h.rows_signal, seen, limit);
      TORCHREPLAY_FAULT("rows.awake");
      const int64_t end = monotonic_ns();
      h.sample_wait.add(end - start, machine_ns());
    }
    return Py_NewRef(Py_None);
  });
}

// refresh(deadline, until_stopped) -> rows: absorbs, lets the limiter see what came, and counts the rows held; None
// when the end of the buffer ended a wait for the lock.
inline PyObject* refresh(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("refresh", nargs, 2);
    auto& s = state_of<SegmentObject>(self);
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    SegmentMemory& m = s.memory();
    const Patience patience{as_int(args[0]), args[1] == Py_True};
    uint64_t rows;
    try {
      attached->settle_feedback(patience);
      WithoutGil unlocked;
      SegmentLock lock(m, patience);
      lock.absorb();
      publish_limit(m);
      rows = m.header().rows;
    } catch (const StoppedMeanwhile&) {
      return Py_NewRef(Py_None);
    }
    return checked(PyLong_FromUnsignedLongLong(rows));
  });
}

// withdraw(): a learner that waited has given up; what it needed is no longer admitted beyond the ratio. It must not
// wait again, for a holder of the mutex that is stopped: then the next draw withdraws the demand.
inline PyObject* withdraw(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    SegmentMemory& m = s.memory();
    try {
      const WithoutGil unlocked;
      const SegmentLock lock(m, {.deadline = 0});
      m.header().demand = 0;
      TORCHREPLAY_FAULT("withdraw.demand");
      publish_limit(m);
    } catch (const LockTimeout&) {
    }
    return Py_NewRef(Py_None);
  });
}

// admit_writers_of(other, n) -> True: a thread that writes to the segment `other` waits here, and `n` items more than
// there are are admitted, until withdraw() or the next draw. It does not wait for a holder of the mutex that is
// stopped.
inline PyObject* admit_writers_of(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("admit_writers_of", nargs, 2);
    if (Py_TYPE(args[0]) != Py_TYPE(self)) throw std::invalid_argument("expected a Segment");
    const uint64_t n = as_uint(args[1]);
    SegmentMemory& other = state_of<SegmentObject>(args[0]).memory();
    SegmentMemory& m = state_of<SegmentObject>(self).memory();
    const std::shared_ptr<AttachedSegment> theirs = state_of<SegmentObject>(args[0]).attached;
    const std::shared_ptr<AttachedSegment> attached = state_of<SegmentObject>(self).attached;
    if (!holds_back_writer_of(m, other)) return Py_NewRef(Py_False);
    try {
      const WithoutGil unlocked;
      SegmentLock lock(m, {.deadline = 0});
      lock.absorb();
      Limiter(m.header()).admit(n);
      publish_limit(m);
    } catch (const LockTimeout&) {
    }
    return Py_NewRef(Py_True);
  });
}

// Changes something under the lock, after what this process has fed back.
template <class Change>
void change_locked(SegmentObject& s, Change&& change) {
  const std::shared_ptr<AttachedSegment> attached = s.attached;
  SegmentMemory& m = s.memory();
  attached->settle_feedback();
  const WithoutGil unlocked;
  SegmentLock lock(m);
  change(m, lock);
}

// raise_largest(priority): items without a priority of their own count as at least this much from now on, as if it had
// been seen here.
inline PyObject* raise_largest(PyObject* self, PyObject* priority) {
  return guarded([&] {
    const double given = as_double(priority);
    if (!(given >= 0 && given <= std::numeric_limits<float>::max()))
      throw std::invalid_argument("the largest priority is " + std::to_string(given) +
                                  ": expected a finite float >= 0");
    change_locked(state_of<SegmentObject>(self), [&](SegmentMemory& m, SegmentLock&) {
      m.header().max_raw = std::max(m.header().max_raw, static_cast<float>(given));
    });
    return Py_NewRef(Py_None);
  });
}

// set_limiter(limiter): for every process, from now on; writers and learners that can go on under it wake up.
inline PyObject* set_limiter(PyObject* self, PyObject* tuple) {
  return guarded([&] {
    const LimiterConfig config = parse_limiter(tuple);
    auto& s = state_of<SegmentObject>(self);
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    change_locked(s, [&](SegmentMemory& m, SegmentLock& lock) {
      lock.absorb();
      LimiterConfig next = config;
      next.cleared = m.header().limiter().cleared;
      change_limiter(m.header(), next);
      publish_limit(m);
    });
    futex_signal(attached->memory->header().rows_signal);
    return Py_NewRef(Py_None);
  });
}

// clear(): takes all rows away, for every process. Batches that its threads ordered are drawn before.
inline PyObject* clear(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    s.memory();
    attached->settle();
    change_locked(s, [](SegmentMemory& m, SegmentLock& lock) {
      lock.clear();
      publish_limit(m);
    });
    return Py_NewRef(Py_None);
  });
}

// limiter -> (min_size, ratio, tolerance or 0).
inline PyObject* get_limiter(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    const std::shared_ptr<AttachedSegment> attached = s.attached;
    SegmentMemory& m = s.memory();
    LimiterConfig config;
    {
      const WithoutGil unlocked;
      const SegmentLock lock(m);
      config = m.header().limiter();
    }
    return told(config);
  });
}

inline PyObject* stop(PyObject* self, PyObject*) {
  return guarded([&] {
    Header& h = state_of<SegmentObject>(self).header();
    h.stopped.store(1, std::memory_order_release);
    TORCHREPLAY_FAULT("stop.silent");
    futex_signal(h.rows_signal);
    futex_signal(h.room_signal);
    return Py_NewRef(Py_None);
  });
}

inline PyObject* stopped(PyObject* self, void*) {
  return guarded([&] {
    return PyBool_FromLong(state_of<SegmentObject>(self).header().stopped.load(std::memory_order_acquire) != 0);
  });
}

}  // namespace torchreplay::py::segment
