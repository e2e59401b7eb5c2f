// `_C.Segment`: making, attaching and watching a segment.
#pragma once

#include <utility>

#include "python/learner.h"
#include "python/properties.h"
#include "python/row_export.h"
#include "python/row_runs.h"
#include "python/stats.h"
#include "python/waits.h"

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
    unsigned long long nonce, seed, capacity, boot = 0;
    PyObject *fields, *batch_type, *sampler, *limiter, *view;
    const char* text;
    Py_ssize_t text_bytes;
    if (!PyArg_ParseTuple(args, "ipKOO|KKOOOs#K", &fd, &create, &nonce, &fields, &batch_type, &seed, &capacity,
                          &sampler, &limiter, &view, &text, &text_bytes, &boot))
      throw PythonError{};
    if (!exchange) throw std::runtime_error("init_arrays() has not been called");
    auto state = std::make_unique<SegmentObject>();
    auto attached = AttachedSegment::make();
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
      SegmentLock lock(*attached->memory);
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
    auto& s = state_of<SegmentObject>(self);
    s.memory();
    s.become_owner();
    return Py_NewRef(Py_None);
  });
}

// describe(fields, capacity, view): what the text of an attached segment says it is. Gives the fields their names.
inline PyObject* describe_segment(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
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
    auto& s = state_of<SegmentObject>(self);
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

inline PyObject* mark_shared(PyObject* self, PyObject*) {
  return guarded([&] {
    state_of<SegmentObject>(self).header().shared.store(1, std::memory_order_relaxed);
    return Py_NewRef(Py_None);
  });
}

// join_supervisor() -> id; leave(id).
inline PyObject* join_supervisor(PyObject* self, PyObject*) {
  return guarded(
      [&] { return checked(PyLong_FromLong(join(state_of<SegmentObject>(self).memory(), Role::kSupervisor))); });
}
inline PyObject* leave_id(PyObject* self, PyObject* id) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    const int64_t i = as_int(id);
    if (i < 1 || i >= kMaxParticipants || !s.memory().liveness().owns(static_cast<int>(i))) return Py_NewRef(Py_None);
    leave(s.memory(), static_cast<int>(i));
    return Py_NewRef(Py_None);
  });
}

// depart(seconds): others count no more on this process, as its owner (for so long) and as a learner, until it draws
// again.
inline PyObject* depart(PyObject* self, PyObject* seconds) {
  return guarded([&] {
    state_of<SegmentObject>(self).depart(as_double(seconds));
    return Py_NewRef(Py_None);
  });
}

// Lets go of a segment whose last user may have to wait for a disk.
inline void release_last(std::shared_ptr<AttachedSegment>& user) {
  const auto attached = std::exchange(user, nullptr);
  if (!attached || attached.use_count() > 1) return;
  auto memory = std::move(attached->memory);
  const WithoutGil unlocked;
  release_segment(std::move(memory));
}

// close_attach_fd(): nobody attaches by it any more.
inline PyObject* close_attach_fd(PyObject* self, PyObject*) {
  return guarded([&] {
    state_of<SegmentObject>(self).attach_fd.reset();
    return Py_NewRef(Py_None);
  });
}

inline PyObject* close_segment(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentObject>(self);
    s.attach_fd.reset();
    s.samplers.clear();
    s.updaters.clear();
    s.learner.reset();
    s.ownership.reset();
    if (s.attached) s.attached->closed = true;
    release_last(s.attached);
    return Py_NewRef(Py_None);
  });
}

inline PyMethodDef methods[] = {
    {"own", own, METH_NOARGS, nullptr},
    {"describe", describe_segment, METH_VARARGS, nullptr},
    {"set_plan", set_plan, METH_VARARGS, nullptr},
    {"sample", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(sample)), METH_FASTCALL, nullptr},
    {"sample_told", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(sample_told)), METH_FASTCALL, nullptr},
    {"gather", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(gather)), METH_FASTCALL, nullptr},
    {"update", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(update)), METH_FASTCALL, nullptr},
    {"settle", settle, METH_O, nullptr},
    {"checked_keys", checked_keys, METH_O, nullptr},
    {"unissued", unissued_key, METH_O, nullptr},
    {"wait_rows", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(wait_rows)), METH_FASTCALL, nullptr},
    {"refresh", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(refresh)), METH_FASTCALL, nullptr},
    {"withdraw", withdraw, METH_NOARGS, nullptr},
    {"admit_writers_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(admit_writers_of)), METH_FASTCALL,
     nullptr},
    {"set_limiter", set_limiter, METH_O, nullptr},
    {"clear", clear, METH_NOARGS, nullptr},
    {"raise_largest", raise_largest, METH_O, nullptr},
    {"stop", stop, METH_NOARGS, nullptr},
    {"mark_shared", mark_shared, METH_NOARGS, nullptr},
    {"census", census, METH_O, nullptr},
    {"stats", stats, METH_NOARGS, nullptr},
    {"column", column, METH_O, nullptr},
    {"export_rows", export_rows, METH_VARARGS, nullptr},
    {"pack_rows", pack_rows, METH_VARARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"admit", admit, METH_O, nullptr},
    {"run_length", run_length, METH_VARARGS, nullptr},
    {"copy_run", copy_run, METH_VARARGS, nullptr},
    {"join_supervisor", join_supervisor, METH_NOARGS, nullptr},
    {"leave", leave_id, METH_O, nullptr},
    {"depart", depart, METH_O, nullptr},
    {"close_attach_fd", close_attach_fd, METH_NOARGS, nullptr},
    {"close", close_segment, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {{"stopped", stopped, nullptr, nullptr, nullptr},
                               {"closed", get_closed, nullptr, nullptr, nullptr},
                               {"learning", get_learning, nullptr, nullptr, nullptr},
                               {"text", get_text, nullptr, nullptr, nullptr},
                               {"called", get_called, set_called, nullptr, nullptr},
                               {"fd", get_fd, nullptr, nullptr, nullptr},
                               {"attach_fd", get_attach_fd, nullptr, nullptr, nullptr},
                               {"nbytes", get_bytes, nullptr, nullptr, nullptr},
                               {"layout_hash", get_layout_hash, nullptr, nullptr, nullptr},
                               {"stream", get_stream, set_stream, nullptr, nullptr},
                               {"step", get_step, set_step, nullptr, nullptr},
                               {"draws_go_on", get_draws_go_on, nullptr, nullptr, nullptr},
                               {"draws", get_draws, nullptr, nullptr, nullptr},
                               {"head", get_head, nullptr, nullptr, nullptr},
                               {"seed", get_seed, nullptr, nullptr, nullptr},
                               {"imports", get_imports, nullptr, nullptr, nullptr},
                               {"limiter", get_limiter, nullptr, nullptr, nullptr},
                               {"in_file", get_in_file, nullptr, nullptr, nullptr},
                               {"address", get_address, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<SegmentObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<SegmentObject>("torchreplay._C.Segment", slots);

}  // namespace segment
}  // namespace torchreplay::py
