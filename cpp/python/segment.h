// `_C.Segment`: making, attaching and watching a segment.
#pragma once

#include "learner.h"
#include "snapshot.h"

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

inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    int fd, create;
    unsigned long long nonce, seed, capacity;
    PyObject *fields, *batch_type, *sampler, *limiter, *view;
    const char* text;
    Py_ssize_t text_bytes;
    if (!PyArg_ParseTuple(args, "ipKOO|KKOOOs#", &fd, &create, &nonce, &fields, &batch_type, &seed, &capacity, &sampler,
                          &limiter, &view, &text, &text_bytes))
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
      config.text.assign(text, static_cast<size_t>(text_bytes));
      int prioritized, normalize;
      if (!PyArg_ParseTuple(sampler, "pidd", &prioritized, &normalize, &config.sampler.alpha, &config.sampler.eps))
        throw PythonError{};
      config.sampler.prioritized = prioritized != 0;
      config.sampler.normalize = static_cast<Normalize>(normalize);
      unsigned long long min_size;
      if (!PyArg_ParseTuple(limiter, "Kddd", &min_size, &config.limiter.ratio, &config.limiter.min_diff,
                            &config.limiter.max_diff))
        throw PythonError{};
      config.limiter.min_size = min_size;
      attached->memory = format_segment(Descriptor::duplicate(fd), config);
      Locked lock(*attached->memory);
      publish_limit(*attached->memory);
    } else {
      attached->memory = open_segment(Descriptor::duplicate(fd), nonce);
    }
    state->attached = std::move(attached);
    state->batch_type = Ref::borrow(batch_type);
    state->nonce = Ref(checked(PyLong_FromUnsignedLongLong(nonce)));
    state->owner = create != 0;
    if (create) {
      state->ownership = std::make_unique<Membership>(state->attached, Role::kOwner);
      state->ownership->id();
    }
    state->learner = std::make_unique<Membership>(state->attached, Role::kLearner);
    state->next_draw.seed = state->header().seed;
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
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
      h.sample_wait_ns.fetch_add(static_cast<uint64_t>(monotonic_ns() - start), std::memory_order_relaxed);
    }
    return Py_NewRef(Py_None);
  });
}

// refresh() -> rows: absorbs, lets the limiter see what came, and counts the rows held.
inline PyObject* refresh(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    uint64_t rows;
    {
      WithoutGil unlocked;
      Locked lock(m);
      lock.absorb();
      publish_limit(m);
      rows = m.header().rows;
    }
    return checked(PyLong_FromUnsignedLongLong(rows));
  });
}

// withdraw(): a learner that waited has given up; what it needed is no longer admitted beyond the ratio.
inline PyObject* withdraw(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    {
      const WithoutGil unlocked;
      const Locked lock(m);
      m.header().demand = 0;
      publish_limit(m);
    }
    return Py_NewRef(Py_None);
  });
}

inline PyObject* stop(PyObject* self, PyObject*) {
  return guarded([&] {
    Header& h = state_of<SegmentState>(self).header();
    h.stopped.store(1, std::memory_order_release);
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

// census(unused_count_as_others) -> dict of counts. Frees what dead participants left behind on its way.
inline PyObject* census(PyObject* self, PyObject* flag) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    Header& h = s.header();
    const Census c = take_census(s.memory(), PyObject_IsTrue(flag) == 1);
    const int64_t now = monotonic_ns(), left = h.last_departure.load(std::memory_order_relaxed);
    return checked(Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:O,s:d,s:d}", "writers", c.writers, "learners",
                                 c.learners, "supervisors", c.supervisors, "owners", c.owners, "others_writing",
                                 c.others_writing, "others_learning", c.others_learning, "waiting", c.waiting, "shared",
                                 h.shared.load(std::memory_order_relaxed) ? Py_True : Py_False, "since_departure",
                                 left ? static_cast<double>(now - left) * 1e-9 : -1.0, "since_write",
                                 c.last_write ? static_cast<double>(now - c.last_write) * 1e-9 : -1.0));
  });
}

// counters() -> dict: everything stats() reports that lies in the header, absorbed to now.
inline PyObject* counters(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    Header& h = m.header();
    uint64_t rows, inserted, sampled, updated, stale, unready;
    int64_t drawable;
    double total, min, max_raw;
    {
      WithoutGil unlocked;
      Locked lock(m);
      lock.absorb();
      publish_limit(m);
      const PriorityTree tree = m.tree();
      rows = h.rows, inserted = h.inserted, sampled = h.sampled, updated = h.updated, stale = h.stale_updates,
      unready = h.unready_updates;
      drawable = tree.count();
      total = static_cast<double>(tree.total()) / static_cast<double>(tree.quantize(1.0f));
      min = drawable ? tree.min() : 0.0;
      max_raw = h.max_raw;
    }
    return checked(Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:L,s:d,s:d,s:d,s:K,s:K,s:d,s:d}", "size", rows, "inserted", inserted, "sampled",
        sampled, "updated", updated, "stale_updates", stale, "unready_updates", unready, "drawable",
        static_cast<long long>(drawable), "priority_total", total, "priority_min", min, "priority_max", max_raw,
        "redraws", h.redraws.load(std::memory_order_relaxed), "rows_written", h.head.load(std::memory_order_relaxed),
        "insert_wait", static_cast<double>(h.insert_wait_ns.load(std::memory_order_relaxed)) * 1e-9, "sample_wait",
        static_cast<double>(h.sample_wait_ns.load(std::memory_order_relaxed)) * 1e-9));
  });
}

// column(i) -> tensor [capacity, *shape] over the segment itself; -1: leaves, float32 [capacity]; -2: key + 1 of each
// slot, int64.
inline PyObject* column(PyObject* self, PyObject* index) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const int64_t i = as_int(index);  // may run code that closes the segment
    SegmentMemory& m = s.memory();
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
    s.attached.reset();
    return Py_NewRef(Py_None);
  });
}

inline PyObject* get_closed(PyObject* self, void*) {
  return guarded([&] { return PyBool_FromLong(!state_of<SegmentState>(self).attached); });
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
    return checked(PyLong_FromUnsignedLongLong(s.next_draw.step));
  });
}
inline int set_step(PyObject* self, PyObject* value, void*) {
  return as_status(guarded([&] {
    auto& s = state_of<SegmentState>(self);
    if (!value) throw std::invalid_argument("step cannot be deleted");
    s.become_learner();  // or the first draw would start the stream over
    s.next_draw.step = as_uint(value);
    return Py_NewRef(Py_None);
  }));
}

inline PyMethodDef methods[] = {
    {"describe", describe_segment, METH_VARARGS, nullptr},
    {"set_plan", set_plan, METH_VARARGS, nullptr},
    {"sample", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(sample)), METH_FASTCALL, nullptr},
    {"gather", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(gather)), METH_FASTCALL, nullptr},
    {"update", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(update)), METH_FASTCALL, nullptr},
    {"wait_rows", wait_rows, METH_O, nullptr},
    {"refresh", refresh, METH_NOARGS, nullptr},
    {"withdraw", withdraw, METH_NOARGS, nullptr},
    {"stop", stop, METH_NOARGS, nullptr},
    {"mark_shared", mark_shared, METH_NOARGS, nullptr},
    {"census", census, METH_O, nullptr},
    {"counters", counters, METH_NOARGS, nullptr},
    {"column", column, METH_O, nullptr},
    {"export_rows", export_rows, METH_VARARGS, nullptr},
    {"import_rows", import_rows, METH_O, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"finish_import", finish_import, METH_VARARGS, nullptr},
    {"join_supervisor", join_supervisor, METH_NOARGS, nullptr},
    {"leave", leave_id, METH_O, nullptr},
    {"close", close_segment, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {
    {"stopped", stopped, nullptr, nullptr, nullptr},  {"closed", get_closed, nullptr, nullptr, nullptr},
    {"text", get_text, nullptr, nullptr, nullptr},    {"fd", get_fd, nullptr, nullptr, nullptr},
    {"nbytes", get_bytes, nullptr, nullptr, nullptr}, {"layout_hash", get_layout_hash, nullptr, nullptr, nullptr},
    {"step", get_step, set_step, nullptr, nullptr},   {"draws", get_draws, nullptr, nullptr, nullptr},
    {"seed", get_seed, nullptr, nullptr, nullptr},    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<SegmentState>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<SegmentState>("torchreplay._C.Segment", slots);

}  // namespace segment
}  // namespace torchreplay::py
