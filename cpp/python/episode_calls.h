// `reset`, `step` and whole episodes: the calls of a writer whose rows are linked, and the writer's type.
#pragma once

#include "python/relay.h"
#include "python/writer_docs.h"

namespace torchreplay::py::writer {

inline void require_linked(const WriterObject& s, const char* method) {
  if (!s.linked())
    throw std::invalid_argument(std::string(method) +
                                "() links rows in time, but the buffer's view is Rows(): use append(), or make the "
                                "buffer with view=Transitions(...) or Sequences(...)");
}

// Episodes under way belong to the thread that wrote their rows: a step of another one's environment would go on where
// they are. Lanes where `but` is set begin anew.
inline void require_own_episodes(const WriterObject& s, const uint8_t* but = nullptr) {
  if (s.session.is_elsewhere(but))
    throw std::invalid_argument(
        "another thread is in the middle of an episode with this writer, and an episode belongs to one thread: call "
        "buffer.writer() in each thread, or reset() here to begin a new episode");
}

// Warns once of a step that begins an episode and brings a reward, which none of Gymnasium's does.
inline void look_at_first_rewards(WriterObject& s) {
  if (!s.lanes().begins_after_end() || !s.roles.reward || s.warned_of_reward) return;
  const FieldValue& reward = s.values[*s.roles.reward];
  for (const StreamRow& row : s.lanes().rows()) {
    if (row.kind != StreamRow::Kind::kReset || row.time < 0 || reward.is_zero(row.time, row.lane)) continue;
    const std::string text =
        "field '" + s.fields().specs[s.fields().fixed[*s.roles.reward]].path + "' is not 0 in environment " +
        std::to_string(row.lane) +
        " in the step after an end. Under autoreset 'next_step' it brings the next episode's first observation, and "
        "Gymnasium gives it no reward. If the environment resets in another way, items are wrong: buffer.writer(envs) "
        "knows which, or say autoreset=. A reward that the loop makes itself is harmless. Pass the episodes of a data "
        "set one by one";
    if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1)) throw PythonError{};
    s.warned_of_reward = true;
    return;
  }
}

// Writes the planned rows; their keys go to the places in `answers` that they answer.
inline void write_planned(PyObject* self, WriterObject& s, int64_t* answers) {
  using Kind = StreamRow::Kind;
  SegmentMemory& m = s.attached->memory();
  const Layout& layout = m.layout();
  const Fields& fields = s.fields();
  const std::vector<StreamRow>& plan = s.lanes().rows();
  const auto fill_row = [&, columns = layout.fields.data(), count = s.values.size()](uint64_t i, uint64_t slot) {
    const StreamRow& row = plan[i];
    for (size_t c = 0; c < count; c++) {
      const Field& field = columns[c];
      if (s.roles.observed[c])
        (row.kind == Kind::kLast ? s.last : s.values)[c].write(m, field, slot, row.obs_time, row.lane);
      else if (row.kind == Kind::kReset && static_cast<int>(c) == s.version_column())
        m.write(field, slot, reinterpret_cast<const char*>(&s.policy_version));
      else if (row.kind == Kind::kReset)
        zero_payload(m.value(field, slot), field.nbytes);
      else
        s.values[c].write(m, field, slot, row.time, row.lane);
      TORCHREPLAY_FAULT("step.field");
    }
  };
  RaggedFill fill(fill_row, fields, layout, [&](size_t field, uint64_t i) {
    const StreamRow& row = plan[i];
    const auto place = [&](int64_t time) { return static_cast<uint64_t>(time) * s.lanes().size() + row.lane; };
    const size_t column = fields.specs[field].column;
    if (s.roles.observation[field])
      return std::pair(&(row.kind == Kind::kLast ? s.ragged_last : s.ragged).of(column), place(row.obs_time));
    const RaggedValue* const own = row.kind == Kind::kReset ? nullptr : &s.ragged.of(column);
    return std::pair(own, own ? place(row.time) : 0);
  });
  const auto priority_of = [&](const StreamRow& row) {
    return s.priorities.of(static_cast<uint64_t>(row.time) * s.lanes().size() + row.lane);
  };
  PythonWait wait(self);
  s.session.write_planned(answers, s.first_key, priority_of, fill, wait, fill.checked_bytes(plan.size(), s.pages));
}

// Writes the planned rows, and returns their keys: an int without lanes.
inline PyObject* write_lanes(PyObject* self, WriterObject& s) {
  if (!s.lanes().vectorised()) {
    int64_t key = -1;
    write_planned(self, s, &key);
    return checked(PyLong_FromLongLong(key));
  }
  const int64_t n = s.lanes().size();
  KeyTensor keys(n);
  std::fill_n(keys.keys, n, -1);
  write_planned(self, s, keys.keys);
  return keys.release(1, &n);
}

// Opens the fields that are observations, or those that are not.
inline void open_some(WriterObject& s, bool observed, Leading& leading) {
  for (size_t f = 0; f < s.given.size(); f++)
    if (s.roles.observation[f] == observed) s.open(f, leading, s.values, s.ragged);
}

// The ragged fields that are observations, or those that are not.
inline std::vector<size_t> ragged_of(const WriterObject& s, bool observed) {
  std::vector<size_t> found;
  for (const size_t f : s.fields().ragged)
    if (s.roles.observation[f] == observed) found.push_back(f);
  return found;
}

inline Leading one_time(const WriterObject& s) {
  const char* several = s.lanes().vectorised() ? nullptr
                                               : "this writer is of one environment; buffer.writer(envs) makes one of "
                                                 "several, and so does num_envs=";
  return {.lanes = s.lanes().vectorised(), .lane_count = static_cast<int64_t>(s.lanes().size()), .several = several};
}

// The lanes to reset: nullptr for all.
inline std::vector<uint8_t> read_mask(const WriterObject& s, PyObject* given) {
  if (!given || given == Py_None) return {};
  ArrayView v;
  const bool opened = s.lanes().vectorised() && v.open_anything(given);
  if (!opened || v.array.dims != 1 || v.array.shape[0] != s.lanes().size() || v.array.element != Element::kBool)
    throw std::invalid_argument(s.lanes().vectorised() ? "mask: got " + describe(given, v, opened) +
                                                             ", expected one bool for each of the " +
                                                             std::to_string(s.lanes().size()) + " environments"
                                                       : std::string("mask belongs to a writer with num_envs"));
  std::vector<uint8_t> mask(s.lanes().size());
  copy_converted(reinterpret_cast<char*>(mask.data()), Element::kBool, v.array.data, v.array, 0);
  return mask;
}

inline PyObject* reset(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    check_positional("reset", nargs);
    const WriterUse use(self, s);
    require_linked(s, "reset");
    PyObject* mask[KeywordMatcher::kOptions] = {};
    s.reset_matcher.match(args, names, s.given.data(), mask);
    Leading leading = one_time(s);
    open_some(s, true, leading);
    s.ragged.check_alike(ragged_of(s, true));
    const std::vector<uint8_t> chosen = read_mask(s, mask[0]);
    if (!chosen.empty()) require_own_episodes(s, chosen.data());
    s.session.lanes().plan_reset(chosen.empty() ? nullptr : chosen.data());
    return write_lanes(self, s);
  });
}

inline std::vector<uint8_t> read_flags(const WriterObject& s, size_t field, int64_t times) {
  std::vector<uint8_t> flags(static_cast<size_t>(times) * s.lanes().size());
  for (int64_t t = 0; t < times; t++)
    for (uint32_t lane = 0; lane < s.lanes().size(); lane++)
      flags[static_cast<size_t>(t) * s.lanes().size() + lane] = s.values[field].flag(t, lane);
  return flags;
}

// Opens the observations with which episodes end in a step that also resets; false when none were given. `ended`: the
// lanes that do.
inline bool open_last(PyObject* self, WriterObject& s, PyObject* given, const std::vector<uint8_t>& ended) {
  if (!given || given == Py_None) return false;
  if (!s.lanes().vectorised() || s.roles.autoreset != Autoreset::kSameStep)
    throw std::invalid_argument("final_obs belongs to a writer with num_envs and autoreset='same_step'");
  Ref dict(checked(PyObject_CallMethod(self, "_last_observations", "Oy#", given, ended.data(),
                                       static_cast<Py_ssize_t>(ended.size()))));
  std::vector<Ref> held;
  collect(s.observations, dict.get(), "", s.given.data(), held);
  Leading leading = one_time(s);
  for (size_t f = 0; f < s.given.size(); f++)
    if (s.roles.observation[f]) s.open(f, leading, s.last, s.ragged_last);
  s.ragged_last.check_alike(ragged_of(s, true));
  s.last_held = std::move(held);
  return true;
}

inline PyObject* step(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    check_positional("step", nargs);
    const WriterUse use(self, s);
    require_linked(s, "step");
    require_own_episodes(s);
    PyObject* options[KeywordMatcher::kOptions] = {};
    s.matcher.match(args, names, s.given.data(), options);
    refuse_lengths("step", options[2]);
    Leading leading = one_time(s);
    s.open_all(leading);
    s.priorities.open(options[0], leading);
    if (!s.lanes().vectorised()) {
      const uint8_t terminated = s.values[s.roles.terminated].flag(0), truncated = s.values[s.roles.truncated].flag(0);
      open_last(self, s, options[1], {});
      s.session.lanes().plan_steps(1, &terminated, &truncated, false, false);
      return write_lanes(self, s);
    }
    const std::vector<uint8_t> terminated = read_flags(s, s.roles.terminated, 1),
                               truncated = read_flags(s, s.roles.truncated, 1);
    std::vector<uint8_t> ended = terminated;
    for (size_t i = 0; i < ended.size(); i++) ended[i] |= truncated[i];
    const bool last_given = open_last(self, s, options[1], ended);
    s.session.lanes().plan_steps(1, terminated.data(), truncated.data(), last_given, false);
    look_at_first_rewards(s);
    return write_lanes(self, s);
  });
}

// _end_episode(mask) -> int64 [n]: the episodes under way end with the rows that are there, which have these keys.
inline PyObject* end_episode(PyObject* self, PyObject* given) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    const WriterUse use(self, s);
    require_linked(s, "end_episode");
    const std::vector<uint8_t> mask = read_mask(s, given);
    const std::vector<int64_t> ends = s.session.end_episodes(mask.empty() ? nullptr : mask.data(), s.roles.truncated);
    const auto n = static_cast<int64_t>(ends.size());
    KeyTensor keys(n);
    std::ranges::copy(ends, keys.keys);
    return keys.release(1, &n);
  });
}

// _truncate(keys): the same for the episodes whose last rows have these keys, of a writer elsewhere.
inline PyObject* truncate_rows(PyObject* self, PyObject* given) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    const WriterUse use(self, s);
    std::vector<int64_t> keys;
    segment::read_keys(given, keys);
    s.session.truncate(keys, s.roles.truncated);
  });
}

// One episode, or with lanes a block of times and lanes: an observation more than steps.
inline PyObject* extend_episodes(PyObject* self, WriterObject& s, PyObject* const* args, PyObject* names) {
  PyObject* options[KeywordMatcher::kOptions] = {};
  s.matcher.match(args, names, s.given.data(), options);
  s.ragged.read_lengths(options[2]);
  if (options[1] && options[1] != Py_None)
    throw std::invalid_argument("extend() takes no final_obs: each observation is the one that the step before led to");
  Leading steps = one_time(s);
  steps.times = true;
  open_some(s, false, steps);
  Leading observations = steps;
  observations.time_count++;
  observations.after_steps = true;
  open_some(s, true, observations);
  s.ragged.check_alike(s.fields().ragged);
  const int64_t times = steps.time_count, lanes = s.lanes().size();
  s.priorities.open(options[0], steps);
  s.session.lanes().plan_steps(times, read_flags(s, s.roles.terminated, times).data(),
                               read_flags(s, s.roles.truncated, times).data(), false, true);
  look_at_first_rewards(s);
  KeyTensor keys((times + 1) * lanes);
  write_planned(self, s, keys.keys);
  const int64_t shape[] = {times + 1, lanes};
  return keys.release(s.lanes().vectorised() ? 2 : 1, shape);
}

inline PyObject* extend(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* names) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    check_positional("extend", nargs);
    const WriterUse use(self, s);
    return s.linked() ? extend_episodes(self, s, args, names) : extend_rows(self, s, args, names);
  });
}

// _admit(n, timeout): waits until n more items are admitted.
inline PyObject* admit(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    expect_args("_admit", nargs, 2);
    const auto n = static_cast<uint32_t>(as_uint(args[0]));
    const WriterUse use(self, s);
    AdmissionWait wait(self, n, args[1]);
    s.session.admit(n, wait);
  });
}

// _end_admission(n): what is not written of so many is given back.
inline PyObject* end_admission(PyObject* self, PyObject* n) {
  return method<WriterObject>(self,
                              [&](WriterObject& s) { s.session.end_admission(static_cast<uint32_t>(as_uint(n))); });
}

using Object = WriterObject;
inline constexpr int kKeywords = METH_FASTCALL | METH_KEYWORDS;
inline PyMethodDef methods[] = {
    {"append", fast(keyed<append>), kKeywords, kAppendDoc},
    {"extend", fast(keyed<extend>), kKeywords, kExtendDoc},
    {"reset", fast(keyed<reset>), kKeywords, kResetDoc},
    {"step", fast(keyed<step>), kKeywords, kStepDoc},
    {"_end_episode", end_episode, METH_O, nullptr},
    {"_truncate", truncate_rows, METH_O, nullptr},
    {"_admit", fast(admit), METH_FASTCALL, nullptr},
    {"_end_admission", end_admission, METH_O, nullptr},
    {"_relay", relay, METH_VARARGS, nullptr},
    // _admitted() -> bool: the limiter would let an append through now.
    {"_admitted", plain_method<Object, [](Object& s) { return s.session.require_open(), s.session.admitted(); }>,
     METH_NOARGS, nullptr},
    // _wanted_bytes() -> int: of pages, that the row needs which waits for some.
    {"_wanted_bytes",
     plain_method<Object,
                  [](Object& s) {
                    s.session.require_open();
                    return s.session.pages_wanted() * s.session.memory().layout().pages.bytes;
                  }>,
     METH_NOARGS, nullptr},
    {"_close", plain_method<Object, [](Object& s) { s.close(); }>, METH_NOARGS, nullptr},
    // _depart(): others count no more on this writer, unless a thread is using it, until it is used again.
    {"_depart", plain_method<Object, [](Object& s) { s.session.depart(); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline int set_buffer_closed(PyObject* self, PyObject* value, void*) {
  return as_status(method<Object>(self, [&](Object& s) { s.buffer_closed = value == Py_True; }));
}

// Of rows that are given none; the Python side has checked it.
inline int set_version(PyObject* self, PyObject* value, void*) {
  return as_status(method<Object>(self, [&](Object& s) {
    if (!value) throw std::invalid_argument("policy_version cannot be deleted");
    s.policy_version = as_int(value);
  }));
}
inline PyGetSetDef getset[] = {
    {"_policy_version", attribute<Object, [](Object& s) { return s.policy_version; }>, set_version, nullptr, nullptr},
    {"_buffer_closed", attribute<Object, [](Object& s) { return s.buffer_closed; }>, set_buffer_closed, nullptr,
     nullptr},
    {"closed", attribute<Object, [](Object& s) { return s.session.closed(); }>, nullptr, "True after close().",
     nullptr},
    {"rows", attribute<Object, [](Object& s) { return s.session.rows(); }>, nullptr, "Rows this writer has written.",
     nullptr},
    {"_begun_items", attribute<Object, [](Object& s) { return s.session.begun_items(); }>, nullptr, nullptr, nullptr},
    {"_open_items", attribute<Object, [](Object& s) { return s.session.open_items(); }>, nullptr, nullptr, nullptr},
    {"_completed", attribute<Object, [](Object& s) { return s.session.completed(); }>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<WriterObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<WriterObject>("torchreplay._C.Writer", slots);

}  // namespace torchreplay::py::writer
