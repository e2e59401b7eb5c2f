// `_C.Segment`: making, attaching and watching a segment.
#pragma once

#include "learner.h"
#include "runs.h"
#include "snapshot.h"
#include "stats.h"

namespace torchreplay::py {
namespace segment {

// From (span, min_steps, stride, history, across, priority_steps).
inline View parse_view(PyObject* tuple) {
  View v;
  if (!PyArg_ParseTuple(tuple, "IIIIII", &v.span, &v.min_steps, &v.stride, &v.history, &v.across, &v.priority_steps))
    throw PythonError{};
  if (v.stride < 1 || v.min_steps < 1) throw std::invalid_argument("bad view");
  return v;
}

// From (min_size, ratio, min_diff, max_diff, tolerance or 0).
inline LimiterConfig parse_limiter(PyObject* tuple) {
  LimiterConfig c;
  unsigned long long min_size;
  if (!PyArg_ParseTuple(tuple, "Kdddd", &min_size, &c.ratio, &c.min_diff, &c.max_diff, &c.tolerance))
    throw PythonError{};
  c.min_size = min_size;
  return c;
}

inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    int fd, create;
    unsigned long long nonce, seed, capacity, boot = 0;
    PyObject *fields, *batch_type, *sampler, *limiter, *view;
    const char* text;
    Py_ssize_t text_bytes;
    if (!PyArg_ParseTuple(args, "ipKOO|KKOOOs#K", &fd, &create, &nonce, &fields, &batch_type, &seed, &capacity,
                          &sampler, &limiter, &view, &text, &text_bytes, &boot))
      throw PythonError{};
    if (!exchange) throw std::runtime_error("init_torch() has not been called");
    auto state = std::make_unique<SegmentState>();
    auto attached = std::make_shared<Attached>();
    if (create) {
      attached->fields = Fields::parse(fields);
      SegmentConfig config;
      config.layout = make_layout(capacity, attached->fields.columns(), parse_view(view),
                                  config_bytes(attached->fields.specs.size(), static_cast<size_t>(text_bytes)));
      config.nonce = nonce;
      config.seed = seed;
      config.boot = boot;
      config.text.assign(text, static_cast<size_t>(text_bytes));
      int prioritized, normalize;
      if (!PyArg_ParseTuple(sampler, "pidd", &prioritized, &normalize, &config.sampler.alpha, &config.sampler.eps))
        throw PythonError{};
      config.sampler.prioritized = prioritized != 0;
      config.sampler.normalize = static_cast<Normalize>(normalize);
      config.limiter = parse_limiter(limiter);
      attached->memory = format_segment(Descriptor::duplicate(fd), config);
      Locked lock(*attached->memory);
      publish_limit(*attached->memory);
    } else {
      attached->memory = open_segment(Descriptor::duplicate(fd), nonce);
    }
    state->attached = std::move(attached);
    state->batch_type = Ref::borrow(batch_type);
    state->nonce = Ref(checked(PyLong_FromUnsignedLongLong(nonce)));
    state->learner = std::make_unique<Membership>(state->attached, Role::kLearner);
    if (create) state->become_owner();
    state->next_draw.seed = state->header().seed;
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// own(): this process opened the file, and takes the place of the one that made it. Its draws follow on all before.
inline PyObject* own(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    s.memory();
    s.become_owner();
    return Py_NewRef(Py_None);
  });
}

// describe(fields, capacity, view): what the text of an attached segment says it is. Gives the fields their names.
inline PyObject* describe_segment(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const Layout& layout = s.memory().layout();
    PyObject *list, *view;
    unsigned long long capacity;
    if (!PyArg_ParseTuple(args, "OKO", &list, &capacity, &view)) throw PythonError{};
    Fields fields = Fields::parse(list);
    const auto& columns = layout.fields;
    bool same = capacity == layout.capacity && parse_view(view) == layout.view && fields.specs.size() == columns.size();
    for (size_t i = 0; same && i < columns.size(); i++)
      same = fields.specs[i].element == columns[i].element && fields.specs[i].nbytes == columns[i].nbytes;
    if (!same) throw NotASegment("the segment's description does not match its layout");
    s.attached->fields = std::move(fields);
    return Py_NewRef(Py_None);
  });
}

// set_plan(fields, outputs, steps, gamma, goal, share): what a batch of a linked view consists of; `outputs` is a list
// of (kind, field, first, count, goal_field), one for each of the batch's fields.
inline PyObject* set_plan(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const Layout& layout = s.memory().layout();
    if (!layout.view.linked()) throw std::invalid_argument("rows are not linked");
    PyObject *list, *outputs;
    ItemPlan plan;
    unsigned int goal;
    if (!PyArg_ParseTuple(args, "OO!IdId", &list, &PyList_Type, &outputs, &plan.steps, &plan.gamma, &goal, &plan.share))
      throw PythonError{};
    plan.goal = static_cast<Goal>(goal);
    for (Py_ssize_t i = 0; i < PyList_Size(outputs); i++) {
      Output o;
      unsigned int kind;
      if (!PyArg_ParseTuple(PyList_GetItem(outputs, i), "IIiII", &kind, &o.field, &o.first, &o.count, &o.goal_field))
        throw PythonError{};
      o.kind = static_cast<Output::Kind>(kind);
      plan.outputs.push_back(o);
    }
    plan.check(layout);
    Fields batch = Fields::parse(list);
    bool same = batch.specs.size() == plan.outputs.size();
    for (size_t o = 0; same && o < plan.outputs.size(); o++) same = batch.specs[o].nbytes == plan.item_bytes(o, layout);
    if (!same) throw std::invalid_argument("the plan of a batch does not match its fields");
    s.samplers.clear();  // they hold the plan before
    s.attached->batch = std::move(batch);
    s.attached->plan = std::move(plan);
    return Py_NewRef(Py_None);
  });
}

// wait_rows(ns): sleeps until a writer signals rows, at most `ns`.
inline PyObject* wait_rows(PyObject* self, PyObject* ns) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    Header& h = s.header();
    const int64_t limit = as_int(ns);
    {
      WithoutGil unlocked;
      const int64_t start = monotonic_ns();
      futex_wait(h.rows_signal, s.seen_rows_signal, limit);
      TORCHREPLAY_FAULT("rows.awake");
      const int64_t end = monotonic_ns();
      h.sample_wait.add(end - start, end);
    }
    return Py_NewRef(Py_None);
  });
}

// refresh(deadline) -> rows: absorbs, lets the limiter see what came, and counts the rows held.
inline PyObject* refresh(PyObject* self, PyObject* deadline) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    const Patience patience{as_int(deadline)};
    attached->settle_feedback(patience.deadline);
    uint64_t rows;
    {
      WithoutGil unlocked;
      Locked lock(m, patience);
      lock.absorb();
      publish_limit(m);
      rows = m.header().rows;
    }
    return checked(PyLong_FromUnsignedLongLong(rows));
  });
}

// withdraw(): a learner that waited has given up; what it needed is no longer admitted beyond the ratio. It must not
// wait again, for a holder of the mutex that is stopped: then the next draw withdraws the demand.
inline PyObject* withdraw(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    try {
      const WithoutGil unlocked;
      const Locked lock(m, {.deadline = 0});
      m.header().demand = 0;
      TORCHREPLAY_FAULT("withdraw.demand");
      publish_limit(m);
    } catch (const LockTimeout&) {
    }
    return Py_NewRef(Py_None);
  });
}

// raise_largest(priority): items without a priority of their own count as at least this much from now on, as if it had
// been seen here.
inline PyObject* raise_largest(PyObject* self, PyObject* priority) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    const double given = as_double(priority);
    if (!(given >= 0 && given <= std::numeric_limits<float>::max()))
      throw std::invalid_argument("the largest priority is " + std::to_string(given) +
                                  ": expected a finite float >= 0");
    attached->settle_feedback();
    {
      const WithoutGil unlocked;
      const Locked lock(m);
      m.header().max_raw = std::max(m.header().max_raw, static_cast<float>(given));
    }
    return Py_NewRef(Py_None);
  });
}

// drawn_from -> (total, drawable, smallest) of the tree as the last draw through this object found it.
inline PyObject* get_drawn_from(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    s.memory();
    return checked(
        Py_BuildValue("dLd", s.drawn_from.total, static_cast<long long>(s.drawn_from.drawable), s.drawn_from.smallest));
  });
}

// set_limiter(limiter): for every process, from now on; whoever can go on under it wakes up.
inline PyObject* set_limiter(PyObject* self, PyObject* tuple) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    const LimiterConfig config = parse_limiter(tuple);
    attached->settle_feedback();
    {
      const WithoutGil unlocked;
      Locked lock(m);
      lock.absorb();
      change_limiter(m.header(), config);
      publish_limit(m);
    }
    futex_signal(m.header().rows_signal);
    return Py_NewRef(Py_None);
  });
}

// limiter -> (min_size, ratio, tolerance or 0).
inline PyObject* get_limiter(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    LimiterConfig config;
    {
      const WithoutGil unlocked;
      const Locked lock(m);
      config = m.header().limiter();
    }
    return checked(
        Py_BuildValue("Kdd", static_cast<unsigned long long>(config.min_size), config.ratio, config.tolerance));
  });
}

inline PyObject* stop(PyObject* self, PyObject*) {
  return guarded([&] {
    Header& h = state_of<SegmentState>(self).header();
    h.stopped.store(1, std::memory_order_release);
    TORCHREPLAY_FAULT("stop.silent");
    futex_signal(h.rows_signal);
    futex_signal(h.room_signal);
    return Py_NewRef(Py_None);
  });
}

inline PyObject* stopped(PyObject* self, void*) {
  return guarded([&] {
    return PyBool_FromLong(state_of<SegmentState>(self).header().stopped.load(std::memory_order_acquire) != 0);
  });
}

inline PyObject* mark_shared(PyObject* self, PyObject*) {
  return guarded([&] {
    state_of<SegmentState>(self).header().shared.store(1, std::memory_order_relaxed);
    return Py_NewRef(Py_None);
  });
}

// column(i) -> tensor [capacity, *shape] over the segment itself; -1: leaves, float32 [capacity]; -2: key + 1 of each
// slot, int64.
inline PyObject* column(PyObject* self, PyObject* index) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const int64_t i = as_int(index);  // may run code that closes the segment
    SegmentMemory& m = s.memory();
    const std::shared_ptr<Attached> attached = s.attached;
    attached->settle_feedback();
    int64_t shape[StridedArray::kMaxDims + 1] = {static_cast<int64_t>(m.capacity())},
                                           strides[StridedArray::kMaxDims + 1];
    strides[0] = 1;
    if (i == -1) return make_tensor(m.tree().leaves(), Element::kF32, 1, shape, strides, s.attached);
    if (i == -2) return make_tensor(&m.at(0), Element::kI64, 1, shape, strides, s.attached);
    if (i < 0 || i >= static_cast<int64_t>(s.attached->fields.specs.size()))
      throw std::invalid_argument("no such column");
    const FieldSpec& spec = s.attached->fields.specs[i];
    const Field& f = m.layout().fields[i];
    const int dims = 1 + static_cast<int>(spec.shape.size());
    std::copy(spec.shape.begin(), spec.shape.end(), shape + 1);
    strides[0] = static_cast<int64_t>(f.stride) / item_size(f.element);
    int64_t dense = 1;
    for (int d = dims - 1; d >= 1; d--) {
      strides[d] = dense;
      dense *= shape[d];
    }
    return make_tensor(m.value(f, 0), f.element, dims, shape, strides, s.attached);
  });
}

// join_supervisor() -> id; leave(id).
inline PyObject* join_supervisor(PyObject* self, PyObject*) {
  return guarded(
      [&] { return checked(PyLong_FromLong(join(state_of<SegmentState>(self).memory(), Role::kSupervisor))); });
}
inline PyObject* leave_id(PyObject* self, PyObject* id) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const int64_t i = as_int(id);
    if (i < 1 || i >= kMaxParticipants || !s.memory().liveness().owns(static_cast<int>(i))) return Py_NewRef(Py_None);
    leave(s.memory(), static_cast<int>(i));
    return Py_NewRef(Py_None);
  });
}

inline PyObject* close_segment(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    s.samplers.clear();
    s.updaters.clear();
    s.learner.reset();
    s.ownership.reset();
    const std::shared_ptr<Attached> attached = std::move(s.attached);
    if (attached && attached.use_count() == 1) {  // its last user may have to wait for a disk
      auto memory = std::move(attached->memory);
      const WithoutGil unlocked;
      release_segment(std::move(memory));
    }
    return Py_NewRef(Py_None);
  });
}

inline PyObject* get_closed(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(!state_of<SegmentState>(self).attached); });
}
inline PyObject* get_in_file(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(state_of<SegmentState>(self).memory().file().phase != Phase::kMemory); });
}
inline PyObject* get_text(PyObject* self, void*) {
  return guarded([&] {
    const std::string text = config_text(state_of<SegmentState>(self).memory());
    return checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
  });
}
inline PyObject* get_fd(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromLong(state_of<SegmentState>(self).memory().fd())); });
}
inline PyObject* get_bytes(PyObject* self, void*) {
  return guarded(
      [&] { return checked(PyLong_FromUnsignedLongLong(state_of<SegmentState>(self).memory().layout().bytes)); });
}
inline PyObject* get_address(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromVoidPtr(state_of<SegmentState>(self).memory().base())); });
}
inline PyObject* get_layout_hash(PyObject* self, void*) {
  return guarded(
      [&] { return checked(PyLong_FromUnsignedLongLong(state_of<SegmentState>(self).header().layout_hash)); });
}
inline PyObject* get_seed(PyObject* self, void*) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(state_of<SegmentState>(self).header().seed)); });
}
inline PyObject* get_draws(PyObject* self, void*) {
  return guarded([&] {
    return checked(
        PyLong_FromUnsignedLongLong(state_of<SegmentState>(self).header().draws.load(std::memory_order_relaxed)));
  });
}
inline PyObject* get_step(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    s.memory();
    return checked(PyLong_FromUnsignedLongLong(s.next_draw.step - s.ahead));
  });
}
inline int set_step(PyObject* self, PyObject* value, void*) {
  return as_status(guarded([&] {
    auto& s = state_of<SegmentState>(self);
    if (!value) throw std::invalid_argument("step cannot be deleted");
    s.become_learner();  // or the first draw would start the stream over
    s.next_draw.step = as_uint(value) + s.ahead;
    return Py_NewRef(Py_None);
  }));
}

inline PyObject* get_stream(PyObject* self, void*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    s.memory();
    s.become_learner();
    return checked(PyLong_FromUnsignedLong(s.next_draw.stream));
  });
}
inline int set_stream(PyObject* self, PyObject* value, void*) {
  return as_status(guarded([&] {
    auto& s = state_of<SegmentState>(self);
    if (!value) throw std::invalid_argument("stream cannot be deleted");
    s.become_learner();
    s.next_draw.stream = static_cast<uint32_t>(as_uint(value));
    return Py_NewRef(Py_None);
  }));
}

inline PyMethodDef methods[] = {
    {"own", own, METH_NOARGS, nullptr},
    {"describe", describe_segment, METH_VARARGS, nullptr},
    {"set_plan", set_plan, METH_VARARGS, nullptr},
    {"sample", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(sample)), METH_FASTCALL, nullptr},
    {"gather", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(gather)), METH_FASTCALL, nullptr},
    {"update", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(update)), METH_FASTCALL, nullptr},
    {"settle", settle, METH_NOARGS, nullptr},
    {"checked_keys", checked_keys, METH_O, nullptr},
    {"wait_rows", wait_rows, METH_O, nullptr},
    {"refresh", refresh, METH_O, nullptr},
    {"withdraw", withdraw, METH_NOARGS, nullptr},
    {"set_limiter", set_limiter, METH_O, nullptr},
    {"raise_largest", raise_largest, METH_O, nullptr},
    {"stop", stop, METH_NOARGS, nullptr},
    {"mark_shared", mark_shared, METH_NOARGS, nullptr},
    {"census", census, METH_O, nullptr},
    {"stats", stats, METH_NOARGS, nullptr},
    {"column", column, METH_O, nullptr},
    {"export_rows", export_rows, METH_VARARGS, nullptr},
    {"import_rows", import_rows, METH_O, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"finish_import", finish_import, METH_VARARGS, nullptr},
    {"admit", admit, METH_O, nullptr},
    {"run_length", run_length, METH_VARARGS, nullptr},
    {"copy_run", copy_run, METH_VARARGS, nullptr},
    {"join_supervisor", join_supervisor, METH_NOARGS, nullptr},
    {"leave", leave_id, METH_O, nullptr},
    {"close", close_segment, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {
    {"stopped", stopped, nullptr, nullptr, nullptr},      {"closed", get_closed, nullptr, nullptr, nullptr},
    {"text", get_text, nullptr, nullptr, nullptr},        {"fd", get_fd, nullptr, nullptr, nullptr},
    {"nbytes", get_bytes, nullptr, nullptr, nullptr},     {"layout_hash", get_layout_hash, nullptr, nullptr, nullptr},
    {"stream", get_stream, set_stream, nullptr, nullptr}, {"step", get_step, set_step, nullptr, nullptr},
    {"draws", get_draws, nullptr, nullptr, nullptr},      {"seed", get_seed, nullptr, nullptr, nullptr},
    {"limiter", get_limiter, nullptr, nullptr, nullptr},  {"in_file", get_in_file, nullptr, nullptr, nullptr},
    {"address", get_address, nullptr, nullptr, nullptr},  {"drawn_from", get_drawn_from, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<SegmentState>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<SegmentState>("torchreplay._C.Segment", slots);

}  // namespace segment
}  // namespace torchreplay::py
