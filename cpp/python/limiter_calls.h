// `_C.limiter_*`: what a limiter asks for, by counts that are kept outside of a segment.
#pragma once

#include "python/object.h"
#include "segment/limiter.h"

namespace torchreplay::py::limiter {

// From (min_size, ratio, min_diff, max_diff, inserted_before, cleared).
inline LimiterConfig parse_rule(PyObject* tuple) {
  LimiterConfig c;
  unsigned long long min_size, inserted_before, cleared;
  if (!PyArg_ParseTuple(tuple, "KdddKK", &min_size, &c.ratio, &c.min_diff, &c.max_diff, &inserted_before, &cleared))
    throw PythonError{};
  c.min_size = min_size;
  c.inserted_before = inserted_before;
  c.cleared = cleared;
  return c;
}

// limiter_needed(rule, sampled, n) -> int: items that must have become drawable before `n` more may be drawn.
inline PyObject* needed(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("limiter_needed", nargs, 3);
    const LimiterConfig config = parse_rule(args[0]);
    const auto sampled = static_cast<double>(as_int(args[1]));
    return checked(PyLong_FromUnsignedLongLong(LimiterRule(config).needed(sampled, as_uint(args[2]))));
  });
}

// limiter_admitted(rule, sampled, n) -> int: items up to which inserts are admitted, while a learner waits for `n`.
inline PyObject* admitted(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("limiter_admitted", nargs, 3);
    const LimiterConfig config = parse_rule(args[0]);
    const LimiterRule rule(config);
    const auto sampled = static_cast<double>(as_int(args[1]));
    return checked(PyLong_FromUnsignedLongLong(rule.admitted(sampled, rule.needed(sampled, as_uint(args[2])))));
  });
}

// limiter_start(rule, inserted) -> int: of `inserted` items those that it does not count if it is set now.
inline PyObject* start(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("limiter_start", nargs, 2);
    const LimiterConfig config = parse_rule(args[0]);
    return checked(PyLong_FromUnsignedLongLong(LimiterRule(config).start(as_uint(args[1]))));
  });
}

}  // namespace torchreplay::py::limiter
