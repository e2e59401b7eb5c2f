// `_C.Writer`: the calls of an explorer.
#pragma once

#include "python/field_values.h"
#include "python/segment_object.h"
#include "write/lanes.h"

namespace torchreplay::py {

// What a linked view says about the fields, and how many streams a writer has.
struct StreamRoles {
  std::vector<bool> observation;  // of each field
  size_t terminated = 0, truncated = 0;
  std::optional<size_t> reward;
  uint32_t lanes = 1;
  bool vectorised = false;
  Autoreset autoreset = Autoreset::kNextStep;

  // From (observation fields, terminated, truncated, reward or -1 for none, lanes or 0 for a writer without a dimension
  // of lanes, autoreset).
  static StreamRoles parse(PyObject* tuple, const std::vector<FieldSpec>& specs) {
    StreamRoles r;
    const size_t fields = specs.size();
    PyObject* observation;
    unsigned long long terminated, truncated;
    long long reward;
    unsigned int lanes, autoreset;
    if (!PyArg_ParseTuple(tuple, "O!KKLII", &PyTuple_Type, &observation, &terminated, &truncated, &reward, &lanes,
                          &autoreset))
      throw PythonError{};
    r.observation.resize(fields);
    for (Py_ssize_t i = 0; i < PyTuple_Size(observation); i++)
      r.observation.at(as_uint(PyTuple_GetItem(observation, i))) = true;
    if (terminated >= fields || truncated >= fields || specs[terminated].nbytes != 1 || specs[truncated].nbytes != 1 ||
        reward >= static_cast<long long>(fields) || autoreset > 2)
      throw std::invalid_argument("bad roles of fields");
    r.terminated = terminated;
    r.truncated = truncated;
    if (reward >= 0) r.reward = static_cast<size_t>(reward);
    r.vectorised = lanes > 0;
    r.lanes = std::max(lanes, 1u);
    r.autoreset = static_cast<Autoreset>(autoreset);
    return r;
  }
};

// How users write an episode's first observation.
inline std::string reset_call(const std::vector<Node>& observations) {
  std::string names;
  for (const Node& n : observations) names += (names.empty() ? "" : ", ") + text_of(n.name) + "=" + text_of(n.name);
  return "writer.reset(" + names + ")";
}

struct WriterObject {
  WriterObject(const std::shared_ptr<AttachedSegment>& a, StreamRoles r)
      : attached(a),
        member(a, Role::kWriter),
        roles(std::move(r)),
        observations(
            pruned(a->fields.tree, [this](int f) { return !roles.observation.empty() && roles.observation[f]; })),
        matcher(a->fields.tree, "priority", linked() ? "final_obs" : nullptr, linked() ? &observations : nullptr),
        reset_matcher(observations, "mask"),
        lanes(roles.lanes, roles.vectorised, roles.autoreset, a->memory->layout().view, reset_call(observations)),
        values(a->fields.specs.size()),
        last(linked() ? values.size() : 0),
        given(values.size()) {}

  bool linked() const { return !roles.observation.empty(); }

  std::shared_ptr<AttachedSegment> attached;
  Membership member;
  StreamRoles roles;
  std::vector<Node> observations;  // names of the observation fields
  KeywordMatcher matcher, reset_matcher;
  Lanes lanes;
  std::vector<FieldValue> values, last;  // `last`: observations that ended episodes
  std::vector<PyObject*> given;
  std::vector<Ref> last_held;
  Priorities priorities;
  std::vector<int64_t> keys;
  int64_t first_key = 0;  // what callers get is this much more than the buffer's own keys
  uint64_t owner = 0;     // the thread that the episodes under way belong to
  uint64_t used_in = 0;   // the fork generation, plus one, of the call in progress; guarded by the interpreter lock
  bool warned_of_reward = false;
  bool closed = false;
  uint64_t rows_before = 0;  // under places that it has given up
  uint32_t seen_room_signal = 0;
  int64_t looked_around = 0;  // when, by the clock of last_write

  uint64_t completed() { return linked() ? lanes.completed() : rows(); }

  bool in_use() const { return used_in == fork_generation.load(std::memory_order_relaxed) + 1; }

  void require_open() const {
    if (closed) throw std::invalid_argument("the writer is closed: make another with buffer.writer()");
  }

  uint64_t rows() {
    const int id = closed ? 0 : member.held();
    return rows_before + (id ? attached->memory->participant(id).rows.load(std::memory_order_relaxed) : 0);
  }
};

// One call's use of a writer: refuses a second one at the same time, and lets go of the arrays at the end.
class WriterUse {
 public:
  WriterUse(PyObject* self, WriterObject& s) : state_(s) {
    s.require_open();
    if (s.attached->closed) {
      const Ref raises(checked(PyObject_CallMethod(self, "_refuse_closed_buffer", nullptr)));
      throw std::runtime_error("the replay buffer is closed");
    }
    if (s.in_use()) throw std::runtime_error("the writer is in use in another thread: make one writer for each thread");
    if (s.used_in) release();  // by a thread of the parent, at the time of the fork
    s.used_in = fork_generation.load(std::memory_order_relaxed) + 1;
    try {
      // Not for long: a writer depends on nobody who may have been stopped.
      s.attached->settle_own({.deadline = monotonic_ns() + kSettleNs});
      Participant& entry = s.attached->memory->participant(s.member.id());
      if (s.member.take_renewed()) s.lanes.forget();
      entry.thread.store(static_cast<uint64_t>(pthread_self()), std::memory_order_relaxed);
    } catch (...) {
      s.used_in = 0;
      throw;
    }
  }
  ~WriterUse() { release(); }
  WriterUse(const WriterUse&) = delete;

 private:
  void release() {
    for (FieldValue& v : state_.values) v.release();
    for (FieldValue& v : state_.last) v.release();
    state_.last_held.clear();
    state_.priorities.release();
    if (state_.keys.capacity() > kKeptRows) give_back(state_.keys);
    if (state_.lanes.rows().capacity() > kKeptRows) state_.lanes.forget_plan();
    state_.matcher.release();
    state_.reset_matcher.release();
    state_.used_in = 0;
  }

  WriterObject& state_;
};

namespace writer {

inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject *segment, *type, *roles;
    long long first_key = 0;
    if (!PyArg_ParseTuple(args, "OOO|L", &type, &segment, &roles, &first_key)) throw PythonError{};
    if (!PyObject_TypeCheck(segment, reinterpret_cast<PyTypeObject*>(type)))
      throw std::invalid_argument("expected a Segment");
    auto& s = state_of<SegmentObject>(segment);
    s.memory();
    const bool linked = s.memory().layout().view.linked();
    if (linked != (roles != Py_None)) throw std::invalid_argument("a linked view needs the roles of the fields");
    auto state = std::make_unique<WriterObject>(
        s.attached, linked ? StreamRoles::parse(roles, s.attached->fields.specs) : StreamRoles{});
    state->member.id();  // announced from the start: a learner that waits knows that rows may come
    state->member.take_renewed();
    state->first_key = first_key;
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

inline void check_positional(const char* method, Py_ssize_t nargs) {
  if (nargs == 0) return;
  PyErr_Format(PyExc_TypeError,
               "%s() takes the fields as keyword arguments: %s(obs=..., action=...), or %s(**fields) with a dict",
               method, method, method);
  throw PythonError{};
}

// Now and then (in Python): is anybody there to draw what is written?
inline void look_around(PyObject* self, WriterObject& s) {
  constexpr int64_t kEvery = 1'000'000'000;
  const int64_t now = s.attached->memory->participant(s.member.id()).last_write.load(std::memory_order_relaxed);
  if (s.looked_around == 0) s.looked_around = now;
  if (now - s.looked_around < kEvery) return;
  s.looked_around = now;
  Ref r(checked(PyObject_CallMethod(self, "_look_around", nullptr)));
}

// After a wait: the parent goes on with this call, and its id is the parent's.
inline void refuse_forked(const WriterObject& s) {
  if (!s.in_use()) throw std::runtime_error("the process was forked out of a waiting call: start a call of its own");
}

// Sleeps while a learner that has fallen behind draws; looks around for signals now and then.
inline void give_way(SegmentMemory& m) {
  Header& h = m.header();
  {
    const WithoutGil unlocked;
    const int64_t start = monotonic_ns();
    h.gate.pause(h.head, h.stopped, kSliceNs);
    h.insert_wait.add(monotonic_ns() - start, machine_ns());
  }
  if (PyErr_CheckSignals()) throw PythonError{};
}

// Writes rows, waiting (in Python, with the signals and the limits of a wait) as often as need be. `rows` and `fill`
// are those of RingWriter::append.
template <class Rows, class Fill>
void write(PyObject* self, WriterObject& s, uint64_t n, Rows& rows, int64_t* keys, Fill& fill) {
  SegmentMemory& m = *s.attached->memory;
  const Header& h = m.header();
  uint64_t bytes = 0;
  for (const Field& f : m.layout().fields) bytes += f.nbytes;
  RingWriter ring(m, s.member.id(), true);
  for (uint64_t written = 0;;) {
    Append outcome = Append::kLimited;
    if (!h.stopped.load(std::memory_order_acquire)) {
      if (bytes * (n - written) > kGilBytes) {
        WithoutGil unlocked;
        outcome = ring.append(n, rows, keys, written, fill);
      } else {
        outcome = ring.append(n, rows, keys, written, fill);
      }
    }
    if (outcome == Append::kDone) break;
    if (outcome == Append::kGated) {
      if (draws_itself(m))
        ring.pass_gate();
      else
        give_way(m);
      refuse_forked(s);
      continue;
    }
    if (outcome == Append::kSpent)
      throw std::runtime_error("the buffer has issued all its " + std::to_string(kMaxKeys) +
                               " keys, and rows without one cannot be told apart: make a new buffer");
    if (outcome == Append::kLost) Descriptor::throw_lost();
    Ref r(checked(PyObject_CallMethod(self, "_wait", "i", outcome == Append::kStalled)));
    refuse_forked(s);
  }
  look_around(self, s);
}

// Rows by themselves, with the priorities given.
struct SingleRows {
  const Priorities& priorities;
  RowMeta meta(uint64_t row) const { return priorities.of(row); }
  void commit(uint64_t, uint64_t) const {}
};

inline void write_rows(PyObject* self, WriterObject& s, uint64_t n, int64_t* keys) {
  SegmentMemory& m = *s.attached->memory;
  const auto& columns = m.layout().fields;
  auto fill = [&](uint64_t row, uint64_t slot) {
    for (size_t f = 0; f < columns.size(); f++) {
      s.values[f].copy(m.value(columns[f], slot), static_cast<int64_t>(row));
      TORCHREPLAY_FAULT("append.field");
    }
  };
  SingleRows rows{s.priorities};
  write(self, s, n, rows, keys, fill);
  for (uint64_t i = 0; i < n; i++) keys[i] += s.first_key;
}

inline PyObject* append(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return guarded([&] {
    check_positional("append", nargs);
    auto& s = state_of<WriterObject>(self);
    const WriterUse use(self, s);
    if (s.linked())
      throw std::invalid_argument(
          "append() writes a row by itself, but the buffer's view links rows: use reset() and step()");
    PyObject* priority[2] = {};
    s.matcher.match(args, names, s.given.data(), priority);
    Leading leading{.several = "append() writes one row; extend() takes rows, here "};
    for (size_t f = 0; f < s.values.size(); f++) s.values[f].open(s.given[f], s.attached->fields.specs[f], leading);
    s.priorities.open(priority[0], leading);
    int64_t key;
    write_rows(self, s, 1, &key);
    return checked(PyLong_FromLongLong(key));
  });
}

inline PyObject* extend_rows(PyObject* self, WriterObject& s, PyObject* const* args, PyObject* names) {
  PyObject* priority[2] = {};
  s.matcher.match(args, names, s.given.data(), priority);
  Leading leading{.times = true};
  for (size_t f = 0; f < s.values.size(); f++) s.values[f].open(s.given[f], s.attached->fields.specs[f], leading);
  const int64_t rows = leading.time_count;
  s.priorities.open(priority[0], leading);
  KeyTensor keys(rows);
  if (rows > 0) write_rows(self, s, static_cast<uint64_t>(rows), keys.keys);
  return keys.release(1, &rows);
}

// _wait_room(ns): after _admitted() was false, sleeps until the limiter admits more, at most `ns`.
inline PyObject* wait_room(PyObject* self, PyObject* ns) {
  return guarded([&] {
    auto& s = state_of<WriterObject>(self);
    s.require_open();
    Header& h = s.attached->memory->header();
    Participant& entry = s.attached->memory->participant(s.member.id());
    const int64_t limit = as_int(ns);
    {
      const WithoutGil unlocked;
      wait_for_room(h, entry, s.seen_room_signal, limit);
    }
    return Py_NewRef(Py_None);
  });
}

// _admitted() -> bool: the limiter would let an append through now. A signal after this look ends the next
// _wait_room(), one before it does not: others may have used up what that one admitted.
inline PyObject* admitted(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<WriterObject>(self);
    s.require_open();
    const Header& h = s.attached->memory->header();
    s.seen_room_signal = h.room_signal.load(std::memory_order_acquire);
    return PyBool_FromLong(h.head.load(std::memory_order_relaxed) < h.ticket_limit.load(std::memory_order_relaxed));
  });
}

inline PyObject* close_writer(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<WriterObject>(self);
    if (s.in_use()) throw std::runtime_error("the writer is in use in another thread");
    s.rows_before = s.rows();
    s.closed = true;
    s.member.release();
    segment::release_last(s.attached);  // or the file of a closed buffer would stay in use
    return Py_NewRef(Py_None);
  });
}

// _depart(): others count no more on this writer, unless a thread is using it, until it is used again.
inline PyObject* depart(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<WriterObject>(self);
    if (s.in_use() || s.closed) return Py_NewRef(Py_None);
    s.rows_before = s.rows();
    s.member.close();
    return Py_NewRef(Py_None);
  });
}

inline PyObject* get_closed(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(state_of<WriterObject>(self).closed); });
}
inline PyObject* get_completed(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(state_of<WriterObject>(self).completed())); });
}
inline PyObject* get_rows(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(state_of<WriterObject>(self).rows())); });
}

}  // namespace writer
}  // namespace torchreplay::py
