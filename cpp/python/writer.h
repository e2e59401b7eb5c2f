// `_C.Writer`: the calls of an explorer.
#pragma once

#include "segment.h"

namespace torchreplay::py {

struct WriterState {
  explicit WriterState(const std::shared_ptr<Attached>& a)
      : attached(a),
        member(a, Role::kWriter),
        matcher(a->fields),
        values(a->fields.specs.size()),
        given(a->fields.specs.size()) {}

  std::shared_ptr<Attached> attached;
  Membership member;
  KeywordMatcher matcher;
  std::vector<FieldValue> values;
  std::vector<PyObject*> given;
  bool in_use = false;  // guarded by the interpreter lock
  bool closed = false;
  uint64_t rows_at_close = 0;
  uint32_t seen_room_signal = 0;

  uint64_t rows() {
    if (closed) return rows_at_close;
    return attached->memory->participant(member.id()).rows.load(std::memory_order_relaxed);
  }
};

// One call's use of a writer: refuses a second one at the same time, and lets go of the arrays at the end.
class WriterUse {
 public:
  explicit WriterUse(WriterState& s) : state_(s) {
    if (s.closed) throw std::invalid_argument("the writer is closed: make another with buffer.writer()");
    if (s.in_use) throw std::runtime_error("the writer is in use in another thread: make one writer for each thread");
    s.in_use = true;
    try {
      Participant& entry = s.attached->memory->participant(s.member.id());
      entry.thread.store(static_cast<uint64_t>(pthread_self()), std::memory_order_relaxed);
    } catch (...) {
      s.in_use = false;
      throw;
    }
  }
  ~WriterUse() {
    for (FieldValue& v : state_.values) v.release();
    state_.matcher.release();
    state_.in_use = false;
  }
  WriterUse(const WriterUse&) = delete;

 private:
  WriterState& state_;
};

namespace writer {

// Copies of more than this release the interpreter lock: below, taking it again costs more than the copy.
inline constexpr uint64_t kGilBytes = 64 << 10;

inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject *segment, *type;
    if (!PyArg_ParseTuple(args, "OO", &type, &segment)) throw PythonError{};
    if (!PyObject_TypeCheck(segment, reinterpret_cast<PyTypeObject*>(type)))
      throw std::invalid_argument("expected a Segment");
    auto& s = state_of<SegmentState>(segment);
    s.memory();
    auto state = std::make_unique<WriterState>(s.attached);
    state->member.id();  // announced from the start: a learner that waits knows that rows may come
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

inline void check_positional(const char* method, Py_ssize_t nargs) {
  if (nargs == 0) return;
  PyErr_Format(PyExc_TypeError, "%s() takes the fields as keyword arguments: %s(obs=..., action=...)", method, method);
  throw PythonError{};
}

inline double priority_of(PyObject* o) {
  const double priority = PyFloat_AsDouble(o);
  if (priority != -1 || !PyErr_Occurred()) return priority;
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw PythonError{};
  PyErr_Clear();
  throw std::invalid_argument("the priority is no number: expected a finite number, or None for the largest one seen");
}

inline RowMeta meta_of(double priority) {
  if (!std::isfinite(priority))
    throw std::invalid_argument(
        "the priority is NaN or infinite: expected a finite number, or None for the largest one seen");
  constexpr double kMax = std::numeric_limits<float>::max();
  return {kHasPriority, 0, static_cast<float>(std::min(std::fabs(priority), kMax))};
}

// Writes rows, waiting (in Python, with the signals and the limits of a wait) as often as need be.
inline void write(PyObject* self, WriterState& s, uint64_t n, const RowMeta* meta, int64_t* keys) {
  SegmentMemory& m = *s.attached->memory;
  const Header& h = m.header();
  const auto& columns = m.layout().fields;
  auto fill = [&](uint64_t row, uint64_t slot) {
    for (size_t f = 0; f < columns.size(); f++) s.values[f].copy(m.value(columns[f], slot), row);
  };
  uint64_t bytes = 0;
  for (const Field& f : columns) bytes += f.nbytes;
  RingWriter ring(m, s.member.id());
  for (uint64_t written = 0;;) {
    s.seen_room_signal = h.room_signal.load(std::memory_order_acquire);
    Append outcome = Append::kLimited;
    if (!h.stopped.load(std::memory_order_acquire)) {
      if (bytes * (n - written) > kGilBytes) {
        WithoutGil unlocked;
        outcome = ring.append(n, meta, keys, written, fill);
      } else {
        outcome = ring.append(n, meta, keys, written, fill);
      }
    }
    if (outcome == Append::kDone) return;
    Ref r(checked(PyObject_CallMethod(self, "_wait", "i", outcome == Append::kStalled)));
  }
}

inline PyObject* append(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return guarded([&] {
    check_positional("append", nargs);
    auto& s = state_of<WriterState>(self);
    const WriterUse use(s);
    PyObject* priority = nullptr;
    s.matcher.match(args, names, s.given.data(), priority);
    int64_t rows = 1;
    for (size_t f = 0; f < s.values.size(); f++) s.values[f].open(s.given[f], s.attached->fields.specs[f], 0, rows);
    const RowMeta meta = priority && priority != Py_None ? meta_of(priority_of(priority)) : RowMeta{};
    int64_t key;
    write(self, s, 1, &meta, &key);
    return checked(PyLong_FromLongLong(key));
  });
}

// The priorities of n rows: none, one number for all, or one for each.
inline std::vector<RowMeta> metas_of(PyObject* priority, int64_t n) {
  std::vector<RowMeta> meta(static_cast<size_t>(n));
  if (!priority || priority == Py_None) return meta;
  if (ArrayView::is_scalar(priority)) {
    std::fill(meta.begin(), meta.end(), meta_of(priority_of(priority)));
    return meta;
  }
  ArrayView v;
  const bool opened = v.open_anything(priority);
  if (!opened || v.array.dims != 1 || v.array.shape[0] != n)
    throw std::invalid_argument("priority: got " + describe(priority, v, opened) +
                                ", expected one number, or one for each row: shape (" + std::to_string(n) + ",)");
  std::vector<double> raw(static_cast<size_t>(n));
  copy_converted(reinterpret_cast<char*>(raw.data()), Element::kF64, v.array.data, v.array, 0);
  for (int64_t i = 0; i < n; i++) meta[i] = meta_of(raw[i]);
  return meta;
}

inline PyObject* extend(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return guarded([&] {
    check_positional("extend", nargs);
    auto& s = state_of<WriterState>(self);
    const WriterUse use(s);
    PyObject* priority = nullptr;
    s.matcher.match(args, names, s.given.data(), priority);
    int64_t rows = -1;
    for (size_t f = 0; f < s.values.size(); f++) s.values[f].open(s.given[f], s.attached->fields.specs[f], 1, rows);
    const std::vector<RowMeta> meta = metas_of(priority, rows);
    BlockOwner block(Block::make(8 * static_cast<size_t>(rows), 1));
    auto* keys = reinterpret_cast<int64_t*>(block.block->data());
    if (rows > 0) write(self, s, static_cast<uint64_t>(rows), meta.data(), keys);
    return make_tensor(keys, Element::kI64, 1, &rows, nullptr, std::move(block));
  });
}

// wait_room(ns): sleeps until the limiter admits writers, at most `ns`.
inline PyObject* wait_room(PyObject* self, PyObject* ns) {
  return guarded([&] {
    auto& s = state_of<WriterState>(self);
    Header& h = s.attached->memory->header();
    Participant& entry = s.attached->memory->participant(s.member.id());
    const int64_t limit = as_int(ns);
    {
      WithoutGil unlocked;
      const int64_t start = monotonic_ns();
      entry.waiting.store(1, std::memory_order_relaxed);
      h.room_waiters.fetch_add(1, std::memory_order_seq_cst);
      futex_wait(h.room_signal, s.seen_room_signal, limit);
      h.room_waiters.fetch_sub(1, std::memory_order_relaxed);
      entry.waiting.store(0, std::memory_order_relaxed);
      h.insert_wait_ns.fetch_add(static_cast<uint64_t>(monotonic_ns() - start), std::memory_order_relaxed);
    }
    return Py_NewRef(Py_None);
  });
}

// admitted() -> bool: the limiter would let an append through now.
inline PyObject* admitted(PyObject* self, PyObject*) {
  return guarded([&] {
    const Header& h = state_of<WriterState>(self).attached->memory->header();
    return PyBool_FromLong(h.head.load(std::memory_order_relaxed) < h.ticket_limit.load(std::memory_order_relaxed));
  });
}

inline PyObject* close_writer(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<WriterState>(self);
    if (s.in_use) throw std::runtime_error("the writer is in use in another thread");
    if (!s.closed) s.rows_at_close = s.rows();
    s.closed = true;
    s.member.close();
    return Py_NewRef(Py_None);
  });
}

inline PyObject* get_closed(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(state_of<WriterState>(self).closed); });
}
inline PyObject* get_rows(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(state_of<WriterState>(self).rows())); });
}

inline PyMethodDef methods[] = {
    {"append", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(append)), METH_FASTCALL | METH_KEYWORDS,
     "append(*, priority=None, **fields)\n--\n\nWrite one row and return its key (int).\n\nThe fields are those of the "
     "spec, each of exactly its shape; a nested field is a dict. `priority` is a raw TD error\n"
     "(its absolute value is taken); None gives the row the largest priority seen so far. Waits while the limiter says "
     "that\nthe learner is behind.\n\nRaises:\n    ValueError: a field is missing, unknown, of another "
     "shape or of a dtype that does not cast; nothing is written.\n    Stopped: the buffer was stopped."},
    {"extend", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(extend)), METH_FASTCALL | METH_KEYWORDS,
     "extend(*, priority=None, **fields)\n--\n\nWrite n rows, whose values have a leading dimension n, and return "
     "their keys (int64 tensor of shape [n]).\n\n`priority` is None, one number for all rows, or "
     "one for each. Waits and raises as `append` does; rows written before a\nwait that fails stay written."},
    {"wait_room", wait_room, METH_O, nullptr},
    {"admitted", admitted, METH_NOARGS, nullptr},
    {"_close", close_writer, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {{"closed", get_closed, nullptr, "True after close().", nullptr},
                               {"rows", get_rows, nullptr, "Rows this writer has written.", nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<WriterState>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<WriterState>("torchreplay._C.Writer", slots);

}  // namespace writer
}  // namespace torchreplay::py
