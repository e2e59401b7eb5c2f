// `_C.Segment`: making, attaching and watching a segment.
#pragma once

#include "python/learner_calls.h"
#include "python/properties.h"
#include "python/queue_calls.h"
#include "python/rewrite_calls.h"
#include "python/row_export.h"
#include "python/row_runs.h"
#include "python/stats.h"

namespace torchreplay::py {
namespace segment {

// How rows become items, and the bytes for values of any length.
struct Shape {
  View view;
  uint64_t ragged_bytes;

  // From (span, min_steps, stride, history, across, priority_steps, claimed, version1, ragged_bytes).
  static Shape parse(PyObject* tuple) {
    View v;
    unsigned long long ragged_bytes;
    if (!PyArg_ParseTuple(tuple, "IIIIIIIIK", &v.span, &v.min_steps, &v.stride, &v.history, &v.across,
                          &v.priority_steps, &v.claimed, &v.version1, &ragged_bytes))
      throw PythonError{};
    if (v.stride < 1 || v.min_steps < 1) throw std::invalid_argument("bad view");
    return {v, ragged_bytes};
  }

  Layout layout_of(uint64_t capacity, const Fields& fields, size_t text_bytes) const {
    return make_layout(capacity, fields.columns(), view,
                       config_bytes(fields.fixed.size(), text_bytes, fields.ragged.size()), fields.ragged_columns(),
                       ragged_bytes);
  }
};

// From (prioritized, normalize, alpha, eps, initial, initial_raw, epochs, queue, drop_oldest, max_draws, window,
// max_age or -1).
inline SamplerConfig parse_sampler(PyObject* tuple) {
  SamplerConfig s;
  int prioritized, epochs, queue, drop_oldest;
  unsigned int normalize, initial;
  unsigned long long max_draws, window;
  long long max_age;
  if (!PyArg_ParseTuple(tuple, "pIddIdpppKKL", &prioritized, &normalize, &s.alpha, &s.eps, &initial, &s.initial_raw,
                        &epochs, &queue, &drop_oldest, &max_draws, &window, &max_age))
    throw PythonError{};
  if (initial >= kInitials) throw std::invalid_argument("bad sampler");
  s.prioritized = prioritized != 0;
  s.epochs = epochs != 0;
  s.queue = queue != 0;
  s.drop_oldest = drop_oldest != 0;
  s.max_draws = max_draws;
  s.window = window;
  s.max_age1 = static_cast<uint64_t>(max_age + 1);
  s.normalize = static_cast<Normalize>(normalize);
  s.initial = static_cast<Initial>(initial);
  return s;
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
    if (create) {
      Fields specs = Fields::parse(fields);
      SegmentConfig config;
      config.layout = Shape::parse(view).layout_of(capacity, specs, static_cast<size_t>(text_bytes));
      config.nonce = nonce;
      config.seed = seed;
      config.boot = boot;
      config.text.assign(text, static_cast<size_t>(text_bytes));
      config.sampler = parse_sampler(sampler);
      config.limiter = parse_limiter(limiter);
      state->segment = AttachedSegment::make(format_segment(Descriptor::duplicate(fd), config));
      state->segment->name_fields(std::move(specs));
      state->segment->refresh({});
    } else {
      state->segment = AttachedSegment::make(open_segment(Descriptor::duplicate(fd), nonce));
    }
    state->batch_type = Ref::borrow(batch_type);
    state->nonce = Ref(checked(PyLong_FromUnsignedLongLong(nonce)));
    state->learner = std::make_shared<Learner>(state->segment);
    if (create) state->learner->own();
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// describe(fields, capacity, view): what the text of an attached segment says it is. Gives the fields their names.
inline PyObject* describe_segment(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    const Layout& layout = segment.memory().layout();
    PyObject *list, *view;
    unsigned long long capacity;
    if (!PyArg_ParseTuple(args, "OKO", &list, &capacity, &view)) throw PythonError{};
    Fields fields = Fields::parse(list);
    const Shape shape = Shape::parse(view);
    const std::vector<Field> columns = fields.columns();
    const std::vector<RaggedField> ragged = fields.ragged_columns();
    const auto alike = [](const Field& a, const Field& b) { return a.element == b.element && a.nbytes == b.nbytes; };
    const auto alike_ragged = [](const RaggedField& a, const RaggedField& b) {
      return a.element == b.element && a.nbytes == b.nbytes && a.group == b.group;
    };
    const bool same =
        capacity == layout.capacity && shape.view == layout.view && columns.size() == layout.fixed_fields() &&
        std::equal(columns.begin(), columns.end(), layout.fields.begin(), alike) &&
        std::ranges::equal(ragged, layout.ragged, alike_ragged) && shape.ragged_bytes == layout.pages.given;
    if (!same) throw NotASegment("the segment's description does not match its layout");
    segment.name_fields(std::move(fields));
  });
}

// set_plan(fields, outputs, steps, gamma, goal, share, discount_field): what a batch of a linked view consists of;
// `outputs` is a list of (kind, field, first, count, goal_field), one for each of the batch's fields.
inline PyObject* set_plan(PyObject* self, PyObject* args) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    const Layout& layout = attached->memory().layout();
    if (!layout.view.linked()) throw std::invalid_argument("rows are not linked");
    PyObject *list, *outputs;
    ItemPlan plan;
    unsigned int goal;
    if (!PyArg_ParseTuple(args, "OO!IdIdi", &list, &PyList_Type, &outputs, &plan.steps, &plan.gamma, &goal, &plan.share,
                          &plan.discount_field))
      throw PythonError{};
    plan.goal = static_cast<Goal>(goal);
    const std::vector<FieldSpec>& specs = attached->fields.specs;
    const auto column_of = [&](uint32_t field) -> uint32_t { return specs.at(field).column; };
    if (plan.discount_field >= 0)
      plan.discount_field = static_cast<int>(column_of(static_cast<uint32_t>(plan.discount_field)));
    for (Py_ssize_t i = 0; i < PyList_Size(outputs); i++) {
      Output o;
      unsigned int kind;
      if (!PyArg_ParseTuple(PyList_GetItem(outputs, i), "IIiII", &kind, &o.field, &o.first, &o.count, &o.goal_field))
        throw PythonError{};
      o.kind = static_cast<Output::Kind>(kind);
      if (o.has_field() && specs.at(o.field).ragged()) {
        o.ragged = static_cast<int32_t>(column_of(std::exchange(o.field, 0)));
      } else if (o.has_field()) {
        o.field = column_of(o.field);
        if (o.kind == Output::Kind::kGoal) o.goal_field = column_of(o.goal_field);
      }
      plan.outputs.push_back(o);
    }
    plan.check(layout);
    Fields batch = Fields::parse(list);
    bool same = batch.specs.size() == plan.outputs.size();
    for (size_t o = 0; same && o < plan.outputs.size(); o++)
      same = batch.specs[o].ragged() == plan.outputs[o].is_ragged() &&
             (batch.specs[o].ragged() || batch.specs[o].nbytes == plan.item_bytes(o, layout));
    if (!same) throw std::invalid_argument("the plan of a batch does not match its fields");
    attached->batch = std::move(batch);
    attached->ragged_outputs = RaggedPlan::of(layout, &plan);
    s.learner->set_plan(std::move(plan));
  });
}

// leave(id): of join_supervisor().
inline PyObject* leave_id(PyObject* self, PyObject* id) {
  return on_segment(self, [&](AttachedSegment& segment) {
    const int64_t i = as_int(id);
    SegmentMemory& m = segment.memory();
    if (i >= 1 && i < kMaxParticipants && m.liveness().owns(static_cast<int>(i))) leave(m, static_cast<int>(i));
  });
}

// depart(seconds): others count no more on this process, as its owner (for so long) and as a learner, until it draws
// again.
inline PyObject* depart(PyObject* self, PyObject* seconds) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    const double of_owner = as_double(seconds);
    s.attached();
    s.learner->depart(of_owner);
  });
}

// set_limiter(limiter): for every process, from now on.
inline PyObject* set_limiter(PyObject* self, PyObject* tuple) {
  return on_segment(self, [&](AttachedSegment& segment) { segment.set_limiter(parse_limiter(tuple)); });
}

// raise_largest(priority): items without a priority of their own count as at least this much from now on, as if it had
// been seen here.
inline PyObject* raise_largest(PyObject* self, PyObject* priority) {
  return on_segment(self, [&](AttachedSegment& segment) {
    const double given = as_double(priority);
    if (!(given >= 0 && given <= std::numeric_limits<float>::max()))
      throw std::invalid_argument("the largest priority is " + std::to_string(given) +
                                  ": expected a finite float >= 0");
    segment.raise_largest(static_cast<float>(given));
  });
}

inline void close_segment(SegmentObject& s) {
  s.attach_fd.reset();
  s.learner->close();
  if (s.segment) s.segment->closed = true;
  Attachment::release(s.segment);
}

inline PyMethodDef methods[] = {
    {"own", plain_method<SegmentObject, [](SegmentObject& s) { s.attached(), s.learner->own(); }>, METH_NOARGS,
     nullptr},
    {"describe", describe_segment, METH_VARARGS, nullptr},
    {"set_plan", set_plan, METH_VARARGS, nullptr},
    {"sample", fast(sample), METH_FASTCALL, nullptr},
    {"sample_told", fast(sample_told), METH_FASTCALL, nullptr},
    {"sample_groups", fast(sample_groups), METH_FASTCALL, nullptr},
    {"gather", fast(gather), METH_FASTCALL, nullptr},
    {"update", fast(update), METH_FASTCALL, nullptr},
    {"rewrite", fast(rewrite), METH_FASTCALL, nullptr},
    {"rows_of", rows_of, METH_O, nullptr},
    {"discard", discard, METH_O, nullptr},
    {"discard_episode", discard_episode, METH_O, nullptr},
    {"settle", settle, METH_O, nullptr},
    {"checked_keys", checked_keys, METH_O, nullptr},
    {"unissued", unissued_key, METH_O, nullptr},
    {"wait_rows", fast(wait_rows), METH_FASTCALL, nullptr},
    {"refresh", fast(refresh), METH_FASTCALL, nullptr},
    {"epoch", epoch, METH_O, nullptr},
    {"give_back", give_back, METH_O, nullptr},
    {"draws_of", draws_of, METH_O, nullptr},
    {"raise_draws", fast(raise_draws), METH_FASTCALL, nullptr},
    {"commit", commit, METH_O, nullptr},
    {"release", release, METH_O, nullptr},
    {"held_draws", held_draws, METH_NOARGS, nullptr},
    {"end_draws", fast(end_draws), METH_FASTCALL, nullptr},
    {"adopt", fast(adopt), METH_FASTCALL, nullptr},
    {"new_loop", plain_method<SegmentObject, [](SegmentObject& s) { return s.learner->new_loop(); }>, METH_NOARGS,
     nullptr},
    {"end_loop", end_loop, METH_O, nullptr},
    {"leave_loop", leave_loop, METH_O, nullptr},
    {"keep_loop", keep_loop, METH_O, nullptr},
    {"held_elsewhere", held_elsewhere, METH_O, nullptr},
    {"queue_state", queue_state, METH_O, nullptr},
    {"withdraw", segment_method<[](Attachment& a) { a.withdraw_demand(); }>, METH_NOARGS, nullptr},
    {"admit_writers_of", fast(admit_writers_of), METH_FASTCALL, nullptr},
    {"set_limiter", set_limiter, METH_O, nullptr},
    {"clear", segment_method<[](Attachment& a) { a.clear(); }>, METH_NOARGS, nullptr},
    {"raise_largest", raise_largest, METH_O, nullptr},
    {"stop", segment_method<[](Attachment& a) { a.stop(); }>, METH_NOARGS, nullptr},
    {"mark_shared", segment_method<[](Attachment& a) { a.mark_shared(); }>, METH_NOARGS, nullptr},
    {"census", census, METH_O, nullptr},
    {"stats", stats, METH_NOARGS, nullptr},
    {"column", column, METH_O, nullptr},
    {"export_rows", export_rows, METH_VARARGS, nullptr},
    {"pack_rows", pack_rows, METH_VARARGS, nullptr},
    {"row_values", row_values, METH_O, nullptr},
    {"is_whole", is_whole, METH_VARARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"admit", admit, METH_VARARGS, nullptr},
    {"run_length", run_length, METH_VARARGS, nullptr},
    {"measure_run", measure_run, METH_VARARGS, nullptr},
    {"was_written", was_written, METH_VARARGS, nullptr},
    {"copy_run", copy_run, METH_VARARGS, nullptr},
    {"join_supervisor", segment_method<[](Attachment& a) { return join(a.memory(), Role::kSupervisor); }>, METH_NOARGS,
     nullptr},
    {"leave", leave_id, METH_O, nullptr},
    {"depart", depart, METH_O, nullptr},
    {"close_attach_fd", plain_method<SegmentObject, [](SegmentObject& s) { s.attach_fd.reset(); }>, METH_NOARGS,
     nullptr},
    {"close", plain_method<SegmentObject, [](SegmentObject& s) { close_segment(s); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<SegmentObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<SegmentObject>("torchreplay._C.Segment", slots);

}  // namespace segment
}  // namespace torchreplay::py
