// `_C.Writer`: the calls of an explorer.
#pragma once

#include "client/writer.h"
#include "python/ragged_values.h"
#include "python/segment_object.h"

namespace torchreplay::py {

// What a linked view says about the fields, and how many streams a writer has.
struct StreamRoles {
  std::vector<bool> observation;         // of each field
  std::vector<bool> observed;            // the same of each column
  size_t terminated = 0, truncated = 0;  // columns
  std::optional<size_t> reward;          // column
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
    const auto is_fixed = [&](unsigned long long f) { return f < fields && !specs[f].ragged(); };
    if (!is_fixed(terminated) || !is_fixed(truncated) || specs[terminated].nbytes != 1 ||
        specs[truncated].nbytes != 1 || (reward >= 0 && !is_fixed(static_cast<unsigned long long>(reward))) ||
        autoreset > 2)
      throw std::invalid_argument("bad roles of fields");
    r.terminated = specs[terminated].column;
    r.truncated = specs[truncated].column;
    if (reward >= 0) r.reward = specs[static_cast<size_t>(reward)].column;
    for (size_t f = 0; f < fields; f++)
      if (!specs[f].ragged()) r.observed.push_back(r.observation[f]);
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

// How a writer's waits end: by what its Python object finds out.
class PythonWait : public Wait {
 public:
  explicit PythonWait(PyObject* writer) : writer_(writer) {}

  void look(Blocked why, int64_t waited_ns) override {
    const bool stalled = why == Blocked::kStalled || why == Blocked::kPagesStalled;
    const bool pages = why == Blocked::kPagesLimited || why == Blocked::kPagesStalled;
    const double waited = static_cast<double>(waited_ns) * 1e-9;
    const Ref r(checked(pages ? PyObject_CallMethod(writer_, "_look", "idi", stalled, waited, 1)
                              : PyObject_CallMethod(writer_, "_look", "id", stalled, waited)));
  }
  void look_around() override { const Ref r(checked(PyObject_CallMethod(writer_, "_look_around", nullptr))); }

 private:
  PyObject* writer_;
};

// The same of a wait to be admitted.
class AdmissionWait : public Wait {
 public:
  AdmissionWait(PyObject* writer, uint32_t n, PyObject* timeout) : writer_(writer), n_(n), timeout_(timeout) {}

  void look(Blocked, int64_t waited_ns) override {
    const Ref r(checked(PyObject_CallMethod(writer_, "_look_before_admission", "IOd", n_, timeout_,
                                            static_cast<double>(waited_ns) * 1e-9)));
  }
  void look_around() override {}

 private:
  PyObject* writer_;
  uint32_t n_;
  PyObject* timeout_;
};

struct WriterObject {
  WriterObject(const std::shared_ptr<AttachedSegment>& a, StreamRoles r, const Pages& p)
      : attached(a),
        pages(p),
        roles(std::move(r)),
        observations(Fields::pruned(a->fields.tree,
                                    [this](int f) { return !roles.observation.empty() && roles.observation[f]; })),
        matcher(a->fields.tree,
                {"priority", linked() ? "final_obs" : nullptr, a->fields.ragged.empty() ? nullptr : "lengths"},
                linked() ? &observations : nullptr, version_field()),
        reset_matcher(observations, {"mask"}),
        session(a, Lanes(roles.lanes, roles.vectorised, roles.autoreset, a->memory().layout().view,
                         reset_call(observations))),
        values(a->fields.fixed.size()),
        last(linked() ? values.size() : 0),
        ragged(a->fields, a->memory().layout(), p),
        ragged_last(a->fields, a->memory().layout(), p),
        given(a->fields.specs.size()) {}

  // Also of a writer that is closed, and has let go of the segment.
  bool linked() const { return !roles.observation.empty(); }
  const Lanes& lanes() const { return session.lanes(); }

  std::shared_ptr<AttachedSegment> attached;
  Pages pages;  // of the buffer in which the rows end: a row's values take a quarter of them at most
  StreamRoles roles;
  std::vector<Node> observations;  // names of the observation fields
  KeywordMatcher matcher, reset_matcher;
  Writer session;
  std::vector<FieldValue> values, last;  // of each column; `last`: observations that ended episodes
  std::vector<FieldValue::Plain> plain;  // of each column, of rows by themselves
  RaggedValues ragged, ragged_last;
  std::vector<PyObject*> given;  // for each field
  std::vector<Ref> last_held;
  Priorities priorities;
  int64_t policy_version = 0;  // of rows that are given none
  int64_t first_key = 0;       // what callers get is this much more than the buffer's own keys; negative: they get none
  bool buffer_closed = false;  // the object of the buffer in which the rows end, where that is elsewhere
  bool warned_of_reward = false;

  const Fields& fields() const { return attached->fields; }

  // The column, and the field, that say by which policy a row came about; -1: none does.
  int version_column() const { return static_cast<int>(attached->memory().layout().view.version1) - 1; }
  int version_field() const {
    return version_column() < 0 ? -1 : static_cast<int>(fields().fixed[static_cast<size_t>(version_column())]);
  }

  // Of ragged fields, `ragged`; of others, `values` or `last`.
  void open(size_t field, Leading& leading, std::vector<FieldValue>& fixed, RaggedValues& of_any_length) {
    const FieldSpec& spec = fields().specs[field];
    if (spec.ragged())
      of_any_length.open(field, given[field], leading);
    else if (!given[field])
      fixed[spec.column].repeat(policy_version);
    else
      fixed[spec.column].open(given[field], spec, leading);
  }
  void open_all(Leading& leading) {
    const Fields& all = fields();
    if (all.ragged.empty() && version_column() < 0) {  // most buffers: a field is a column
      FieldValue* value = values.data();
      PyObject* const* object = given.data();
      for (const FieldSpec& spec : all.specs) value++->open(*object++, spec, leading);
      return;
    }
    for (size_t f = 0; f < all.specs.size(); f++) open(f, leading, values, ragged);
    if (!all.ragged.empty()) ragged.check_alike(all.ragged);
  }

  void close() {
    session.close();
    Attachment::release(attached);
  }

  // Lets go of the arrays of a call.
  void release_values() {
    for (FieldValue& v : values) v.release();
    for (FieldValue& v : last) v.release();
    if (!ragged.empty()) ragged.release();
    if (!ragged_last.empty()) ragged_last.release();
    last_held.clear();
    priorities.release();
    session.trim(kKeptRows);
    matcher.release();
    reset_matcher.release();
  }
};

// One call's use of a writer: refuses a second one at the same time, and lets go of the arrays at the end.
class WriterUse {
 public:
  WriterUse(PyObject* self, WriterObject& s) : state_(s) {
    s.session.require_open();
    if (s.attached->closed || s.buffer_closed) {
      if (s.attached->stopped()) throw Stopped(s.attached->memory().called());
      const Ref raises(checked(PyObject_CallMethod(self, "_refuse_closed_buffer", nullptr)));
      throw std::runtime_error("the replay buffer is closed");
    }
    if (s.session.is_left_over()) s.release_values();
    call_.emplace(s.session);
  }
  ~WriterUse() { state_.release_values(); }
  WriterUse(const WriterUse&) = delete;

 private:
  WriterObject& state_;
  std::optional<Writer::Call> call_;  // ends after the arrays
};

namespace writer {

inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject *segment, *type, *roles;
    long long first_key = 0;
    unsigned long long capacity = 0, ragged_bytes = 0;
    if (!PyArg_ParseTuple(args, "OOO|L(KK)", &type, &segment, &roles, &first_key, &capacity, &ragged_bytes))
      throw PythonError{};
    if (!PyObject_TypeCheck(segment, reinterpret_cast<PyTypeObject*>(type)))
      throw std::invalid_argument("expected a Segment");
    const std::shared_ptr<AttachedSegment> attached = state_of<SegmentObject>(segment).attached();
    const bool linked = attached->linked();
    if (linked != (roles != Py_None)) throw std::invalid_argument("a linked view needs the roles of the fields");
    Pages pages = attached->memory().layout().pages;
    if (capacity && ragged_bytes) pages.cut(ragged_bytes, capacity);
    auto state = std::make_unique<WriterObject>(
        attached, linked ? StreamRoles::parse(roles, attached->fields.specs) : StreamRoles{}, pages);
    state->first_key = first_key;
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// A call that writes; callers get its keys unless the writer knows none.
template <PyObject* (*write)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)>
PyObject* keyed(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  PyObject* keys = write(self, args, nargs, names);
  if (!keys || state_of<WriterObject>(self).first_key >= 0) return keys;
  Py_DECREF(keys);
  return Py_NewRef(Py_None);
}

inline void check_positional(const char* method, Py_ssize_t nargs) {
  if (nargs == 0) return;
  PyErr_Format(PyExc_TypeError,
               "%s() takes the fields as keyword arguments: %s(obs=..., action=...), or %s(**fields) with a dict",
               method, method, method);
  throw PythonError{};
}

// Rows by themselves, with the priorities given.
struct SingleRows {
  const Priorities& priorities;
  RowMeta meta(uint64_t row) const { return priorities.of(row); }
  void commit(uint64_t, uint64_t) const {}
};

inline void write_rows(PyObject* self, WriterObject& s, uint64_t n, int64_t* keys) {
  SegmentMemory& m = s.attached->memory();
  const Layout& layout = m.layout();
  const Fields& fields = s.fields();
  s.plain.clear();
  for (const FieldValue& value : s.values) s.plain.push_back(value.plain());
  // By value: what a row writes might change what is looked up anew for each of its fields.
  const auto fill_row = [&m, values = s.values.data(), plain = s.plain.data(), columns = layout.fields.data(),
                         count = s.values.size()](uint64_t row, uint64_t slot) {
    for (size_t c = 0; c < count; c++) {
      if (const FieldValue::Plain& p = plain[c]; p.nbytes)
        copy_value(m.value(columns[c], slot), p.from + static_cast<int64_t>(row) * p.time_stride, p.nbytes);
      else
        values[c].write(m, columns[c], slot, static_cast<int64_t>(row));
      TORCHREPLAY_FAULT("append.field");
    }
  };
  SingleRows rows{s.priorities};
  PythonWait wait(self);
  if (fields.ragged.empty()) {
    s.session.write(n, rows, keys, fill_row, wait);
  } else {
    RaggedFill fill(fill_row, fields, layout, [&](size_t field, uint64_t row) {
      return std::pair(&s.ragged.of(fields.specs[field].column), row);
    });
    s.session.write(n, rows, keys, fill, wait, fill.checked_bytes(n, s.pages));
  }
  for (uint64_t i = 0; i < n; i++) keys[i] += s.first_key;
}

inline void refuse_lengths(const char* method, PyObject* lengths) {
  if (lengths)
    throw std::invalid_argument(std::string(method) + "() takes no lengths: each ragged field gets one value; " +
                                "extend() takes the values of several rows one after the other");
}

inline PyObject* append(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    check_positional("append", nargs);
    const WriterUse use(self, s);
    if (s.linked())
      throw std::invalid_argument(
          "append() writes a row by itself, but the buffer's view links rows: use reset() and step()");
    PyObject* options[KeywordMatcher::kOptions] = {};
    s.matcher.match(args, names, s.given.data(), options);
    refuse_lengths("append", options[2]);
    Leading leading{.several = "append() writes one row; extend() takes rows, here "};
    s.open_all(leading);
    s.priorities.open(options[0], leading);
    int64_t key;
    write_rows(self, s, 1, &key);
    return key;
  });
}

inline PyObject* extend_rows(PyObject* self, WriterObject& s, PyObject* const* args, PyObject* names) {
  PyObject* options[KeywordMatcher::kOptions] = {};
  s.matcher.match(args, names, s.given.data(), options);
  s.ragged.read_lengths(options[2]);
  Leading leading{.times = true};
  s.open_all(leading);
  const int64_t rows = leading.time_count;
  if (rows < 0)
    throw std::invalid_argument("extend() got no field that says how many rows there are: give policy_version");
  s.priorities.open(options[0], leading);
  KeyTensor keys(rows);
  if (rows > 0) write_rows(self, s, static_cast<uint64_t>(rows), keys.keys);
  return keys.release(1, &rows);
}

}  // namespace writer
}  // namespace torchreplay::py
