// `_C.UnionShards`: the shards that are drawn from as if they were one buffer.
#pragma once

#include "client/union_shards.h"
#include "python/learner_calls.h"
#include "python/link_object.h"
#include "python/union_object.h"

namespace torchreplay::py {

struct UnionShardsObject {
  Ref segment;  // the shard here, if there is one
  std::shared_ptr<AttachedSegment> attached;
  std::unique_ptr<UnionShards> shards;
};

// The draws of one iteration from the shard here.
struct DrawsHereObject {
  Ref segment;
  std::shared_ptr<DrawsHere> draws;
};

namespace union_shards {

using Object = UnionShardsObject;

// UnionShards(exchange, shards, segment, largest, before). `shards`: of each its number and its Link, or None where it
// is `segment`, which is None where none is. `before`: what reached some of these shards before, which knows what they
// have, or None.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject *exchange, *list, *segment, *before;
    double largest;
    if (!PyArg_ParseTuple(args, "OO!OdO", &exchange, &PyList_Type, &list, &segment, &largest, &before))
      throw PythonError{};
    auto state = std::make_unique<UnionShardsObject>();
    std::shared_ptr<Learner> learner;
    if (segment != Py_None) {
      const auto& s = state_of<SegmentObject>(segment);
      state->segment = Ref::borrow(segment);
      state->attached = s.attached();
      learner = s.learner;
      if (!state->attached->outputs().ragged.empty())
        throw std::invalid_argument("values of any length are put together elsewhere");
    }
    std::vector<UnionShards::Shard> shards;
    for (Py_ssize_t i = 0; i < PyList_Size(list); i++) {
      long long number;
      PyObject* link;
      if (!PyArg_ParseTuple(PyList_GetItem(list, i), "LO", &number, &link)) throw PythonError{};
      if (link == Py_None && !learner) throw std::invalid_argument("a shard is nowhere");
      shards.push_back({number, link == Py_None ? nullptr : state_of<LinkObject>(link).link});
    }
    if (shards.empty()) throw std::invalid_argument("there are no shards");
    state->shards = std::make_unique<UnionShards>(state_of<ExchangeObject>(exchange).shared, std::move(shards),
                                                  std::move(learner), largest);
    if (before != Py_None) state->shards->take_over(*state_of<Object>(before).shards);
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// DrawsHere(segment): of the shard here.
inline int init_draws(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject* segment;
    if (!PyArg_ParseTuple(args, "O", &segment)) throw PythonError{};
    install(self, new DrawsHereObject{Ref::borrow(segment),
                                      std::make_shared<DrawsHere>(state_of<SegmentObject>(segment).learner)});
    return Py_NewRef(Py_None);
  }));
}

// draw(n, beta, weights, seed, stream, step, slack, batch, tensors, draws) -> (UnionDraw, batch): asks all shards for
// candidates. The shard here draws its own in their turn of `draws`, a DrawsHere, or, where that is None, at once.
// The first six as for UnionDraw; `slack` as for UnionShards. `batch` is overwritten; None: it is made,
// where there is a segment. Without one `tensors` has its tensors, as for UnionDraw. Or it has, without a batch, the
// bytes of an item in each: the batch is the body of the only reply. None: a connection is broken.
inline PyObject* draw(PyObject* self, PyObject* args) {
  return method<Object>(self, [&](Object& s) {
    int n;
    double beta, slack;
    const char* weights;
    unsigned long long seed, stream, step;
    PyObject *given, *tensors, *draws;
    if (!PyArg_ParseTuple(args, "idsKKKdOOO", &n, &beta, &weights, &seed, &stream, &step, &slack, &given, &tensors,
                          &draws))
      throw PythonError{};
    require_here(s.shards->exchange());
    if (!s.shards->is_whole()) return Py_NewRef(Py_None);
    const std::vector<int64_t> counts = s.shards->asked(n, slack);
    Ref object(checked(PyType_GenericAlloc(union_draw::type, 0)));
    auto state = std::make_unique<UnionDrawObject>();
    state->round =
        std::make_shared<UnionRound>(UnionDraw(n, beta, union_draw::weights_named(weights), seed, stream, step));
    state->exchange = s.shards->exchange();
    BatchPointers pointers;
    int threads = 1;
    if (s.attached) {
      auto& segment = state_of<SegmentObject>(s.segment.get());
      const Fields& outputs = s.attached->outputs();
      if (given == Py_None) {
        BatchBuilder builder = s.attached->new_batch(n);
        builder.point(pointers);
        state->batch = Ref(segment::make_batch(segment, builder));
      } else {
        GivenBatch(outputs, false, n, given, segment::reserved_names()).point(pointers);
        state->batch = Ref::borrow(given);
      }
      std::vector<UnionDraw::Output> batch;
      batch.reserve(outputs.specs.size() + 3);
      for (size_t o = 0; o < outputs.specs.size(); o++) batch.push_back({pointers.values[o], outputs.specs[o].nbytes});
      batch.push_back({reinterpret_cast<char*>(pointers.keys), 8});
      batch.push_back({reinterpret_cast<char*>(pointers.weight), 4});
      batch.push_back({reinterpret_cast<char*>(pointers.probability), 4});
      state->round->set_batch(std::move(batch));
      threads = threads_for(outputs, *std::ranges::max_element(counts));
    } else {
      state->round->set_batch(given == Py_None ? union_draw::sizes_of(tensors)
                                               : union_draw::outputs_of(tensors, n, state->tensors));
      state->batch = Ref::borrow(given);
    }
    const std::shared_ptr<UnionRound> round = state->round;
    std::shared_ptr<DrawsHere> here;
    if (draws != Py_None && s.attached) here = state_of<DrawsHereObject>(draws).draws;
    const Ref batch = Ref::borrow(state->batch.get());
    install(object.get(), state.release());
    // Whoever lets go of it holds the interpreter's lock, as for all orders of a PrefetchStream.
    std::shared_ptr<void> memory(Py_NewRef(batch.get()), [](void* o) { Py_DECREF(static_cast<PyObject*>(o)); });
    if (s.shards->order(round, counts, pointers, threads, here.get(), std::move(memory)))
      state_of<UnionDrawObject>(object.get()).draws = std::move(here);
    return checked(PyTuple_Pack(2, object.get(), batch.get()));
  });
}

// take_in(draw) -> (whether the batch is made, and all shards have said no more than figures; whether one was stopped).
// False where not all is there.
inline PyObject* take_in(PyObject* self, PyObject* draw) {
  return method<Object>(self, [&](Object& s) {
    UnionDrawObject& drawn = state_of<UnionDrawObject>(draw);
    bool stopped = false;
    const bool made =
        union_draw::is_taken(drawn) && s.shards->take_in(*drawn.round, stopped) && union_draw::is_made(drawn);
    return checked(PyTuple_Pack(2, made ? Py_True : Py_False, stopped ? Py_True : Py_False));
  });
}

// said() -> [(number, head)] of the answers that were taken in since it was called last.
inline PyObject* said(Object& s) {
  const Ref list(checked(PyList_New(0)));
  for (const auto& [number, head] : s.shards->said()) {
    const Ref entry(checked(
        Py_BuildValue("(Ly#)", static_cast<long long>(number), head.data(), static_cast<Py_ssize_t>(head.size()))));
    if (PyList_Append(list.get(), entry.get())) throw PythonError{};
  }
  return Py_NewRef(list.get());
}

// replies(draw) -> [(number, Reply)] of those that come over connections.
inline PyObject* replies(PyObject* self, PyObject* draw) {
  return method<Object>(self, [&](Object& s) {
    const auto of = state_of<UnionDrawObject>(draw).round->replies();
    const Ref list(checked(PyList_New(0)));
    for (size_t i = 0; i < of.size(); i++) {
      if (!of[i]) continue;
      const Ref reply(wire::make_reply(s.shards->exchange(), of[i]));
      const Ref entry(
          checked(Py_BuildValue("(LO)", static_cast<long long>(s.shards->shards()[i].number), reply.get())));
      if (PyList_Append(list.get(), entry.get())) throw PythonError{};
    }
    return Py_NewRef(list.get());
  });
}

// feed_back(batch_or_keys, td, nonce) -> [(number, how many, Reply)]: TD errors are on their way to other nodes, and
// applied here. None: nothing was done. Something is wrong with them, or the batch is not signed with the nonce, or a
// shard is not among these, or a connection is broken.
inline PyObject* feed_back(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<Object>(self, [&](Object& s) {
    expect_args("feed_back", nargs, 3);
    require_here(s.shards->exchange());
    PyObject* const found = PyDict_Check(args[0]) ? segment::signed_keys(args[0], args[2]) : args[0];
    if (!found) return Py_NewRef(Py_None);
    const Ref keys = Ref::borrow(found);  // reading them may run code that changes the batch
    Feedback feedback;
    try {
      segment::read_keys(keys.get(), feedback.keys);
      segment::read_td(args[1], static_cast<int64_t>(feedback.keys.size()), feedback.td);
    } catch (const std::invalid_argument&) {
      return Py_NewRef(Py_None);
    }
    const auto sent = s.shards->feed_back(feedback);
    if (!sent) return Py_NewRef(Py_None);
    const Ref list(checked(PyList_New(0)));
    for (const UnionShards::Sent& part : *sent) {
      const Ref reply(wire::make_reply(s.shards->exchange(), part.reply));
      const Ref entry(checked(Py_BuildValue("(LnO)", static_cast<long long>(part.number),
                                            static_cast<Py_ssize_t>(part.count), reply.get())));
      if (PyList_Append(list.get(), entry.get())) throw PythonError{};
    }
    return Py_NewRef(list.get());
  });
}

inline PyMethodDef draws_methods[] = {
    {"close", plain_method<DrawsHereObject, [](DrawsHereObject& s) { s.draws->close(); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef draws_getset[] = {
    {"is_closed", attribute<DrawsHereObject, [](DrawsHereObject& s) { return s.draws->is_closed(); }>, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot draws_slots[] = {{Py_tp_init, reinterpret_cast<void*>(init_draws)},
                                    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<DrawsHereObject>)},
                                    {Py_tp_methods, draws_methods},
                                    {Py_tp_getset, draws_getset},
                                    {0, nullptr}};
inline PyType_Spec draws_spec = type_spec<DrawsHereObject>("torchreplay._C.DrawsHere", draws_slots);

inline PyMethodDef methods[] = {{"draw", draw, METH_VARARGS, nullptr},
                                {"take_in", take_in, METH_O, nullptr},
                                {"said", plain_method<Object, [](Object& s) { return said(s); }>, METH_NOARGS, nullptr},
                                {"replies", replies, METH_O, nullptr},
                                {"feed_back", fast(feed_back), METH_FASTCALL, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
// {number: total}: the sum of all leaves, as each shard said last.
inline PyObject* totals(Object& s) {
  const Ref dict(checked(PyDict_New()));
  for (const UnionShards::Shard& shard : s.shards->shards()) {
    const Ref number(checked(PyLong_FromLongLong(shard.number))), total(checked(PyFloat_FromDouble(shard.tree.total)));
    if (PyDict_SetItem(dict.get(), number.get(), total.get())) throw PythonError{};
  }
  return Py_NewRef(dict.get());
}

inline PyGetSetDef getset[] = {
    {"totals", attribute<Object, [](Object& s) { return totals(s); }>, nullptr, nullptr, nullptr},
    {"drawable", attribute<Object, [](Object& s) { return s.shards->drawable(); }>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<Object>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<Object>("torchreplay._C.UnionShards", slots);

}  // namespace union_shards
}  // namespace torchreplay::py
