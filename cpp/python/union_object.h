// `_C.UnionDraw`: one batch of several buffers that are drawn from as if they were one.
#pragma once

#include <deque>

#include "client/union_shards.h"
#include "python/array_view.h"
#include "python/reply_object.h"

namespace torchreplay::py {

struct UnionDrawObject {
  ~UnionDrawObject() {
    try {
      if (draws) draws->close();  // nobody takes what it has ordered there
    } catch (...) {               // another thread is at that
    }
    if (round->here())
      round->abandon();
    else
      leave_to_parent(round);
  }

  std::deque<ArrayView> tensors;  // of the batch
  Ref batch;
  Ref block;  // a tensor of the body that is the batch, once somebody wants it
  std::shared_ptr<UnionRound> round;
  std::shared_ptr<Exchange> exchange;  // of its replies
  std::shared_ptr<DrawsHere> draws;    // of what is drawn here, until it is taken
};

namespace union_draw {

inline PyTypeObject* type = nullptr;

inline UnionWeights weights_named(const std::string& name) {
  if (name == "equal") return UnionWeights::kEqual;
  if (name == "buffer") return UnionWeights::kBuffer;
  if (name == "batch") return UnionWeights::kBatch;
  if (name == "none") return UnionWeights::kNone;
  throw std::invalid_argument("weights are divided by nothing that is called '" + name + "'");
}

// The last tensors are key, weight and probability.
inline void require_drawn(const std::vector<UnionDraw::Output>& batch) {
  const size_t k = batch.size() - 3;
  if (batch[k].item_bytes != 8 || batch[k + 1].item_bytes != 4 || batch[k + 2].item_bytes != 4)
    throw std::invalid_argument("the last tensors of the batch are not key, weight and probability");
}

// The tensors of a batch of `n`, of which key, weight and probability are the last ones.
inline std::vector<UnionDraw::Output> outputs_of(PyObject* list, int64_t n, std::deque<ArrayView>& views) {
  std::vector<UnionDraw::Output> batch;
  const Py_ssize_t count = PyList_Size(list);
  if (count < 3 || n < 1) throw std::invalid_argument("a batch has items, keys, weights and probabilities");
  for (Py_ssize_t i = 0; i < count; i++) {
    ArrayView& view = views.emplace_back();
    if (!view.open(PyList_GetItem(list, i))) throw std::invalid_argument("the batch has " + view.problem);
    const StridedArray& a = view.array;
    if (a.dims < 1 || a.shape[0] != n || !is_dense(a, 0))
      throw std::invalid_argument("a tensor of the batch is not contiguous, or has not one value for each item");
    uint64_t bytes = static_cast<uint64_t>(item_size(a.element));
    for (int d = 1; d < a.dims; d++) bytes *= static_cast<uint64_t>(a.shape[d]);
    batch.push_back({const_cast<char*>(a.data), bytes});
  }
  require_drawn(batch);
  return batch;
}

// The same without memory: the bytes of an item in each.
inline std::vector<UnionDraw::Output> sizes_of(PyObject* list) {
  std::vector<UnionDraw::Output> batch;
  if (!PyList_Check(list) || PyList_Size(list) < 3)
    throw std::invalid_argument("a batch has items, keys, weights and probabilities");
  const Py_ssize_t count = PyList_Size(list);
  batch.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; i++)
    batch.push_back({nullptr, static_cast<uint64_t>(as_int(PyList_GetItem(list, i)))});
  require_drawn(batch);
  return batch;
}

// UnionDraw(n, beta, weights, seed, stream, step, tensors). `weights`: "equal" for 1 each, else how the sampler divides
// them. `tensors`: of a batch of n, contiguous, on the CPU; key, weight and probability are the last ones.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    int n;
    double beta;
    const char* weights;
    unsigned long long seed, stream, step;
    PyObject* list;
    if (!PyArg_ParseTuple(args, "idsKKKO!", &n, &beta, &weights, &seed, &stream, &step, &PyList_Type, &list))
      throw PythonError{};
    auto state = std::make_unique<UnionDrawObject>();
    state->round = std::make_shared<UnionRound>(UnionDraw(n, beta, weights_named(weights), seed, stream, step));
    state->round->set_batch(outputs_of(list, n, state->tensors));
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// Of ((total, drawable, smallest, ...), items, block or None, what to add to keys). The block is a uint8 tensor, which
// the caller keeps.
inline Candidates candidates_of(PyObject* part, std::deque<ArrayView>& views, const UnionRound& round) {
  PyObject *tree, *block;
  long long given, add;
  if (!PyArg_ParseTuple(part, "O!LOL", &PyTuple_Type, &tree, &given, &block, &add)) throw PythonError{};
  if (PyTuple_Size(tree) < 3) throw std::invalid_argument("a tree has a total, a count and a smallest leaf");
  Candidates made;
  made.tree.total = as_double(PyTuple_GetItem(tree, 0));
  made.tree.drawable = as_int(PyTuple_GetItem(tree, 1));
  made.tree.smallest = as_double(PyTuple_GetItem(tree, 2));
  made.given = given;
  made.add_to_keys = add;
  if (block == Py_None) return made;
  ArrayView& view = views.emplace_back();
  if (!view.open(block)) throw std::invalid_argument("a block is " + view.problem);
  const StridedArray& a = view.array;
  if (given < 0 || a.element != Element::kU8 || a.dims != 1 || !is_dense(a, 0) ||
      static_cast<uint64_t>(a.shape[0]) < round.block_bytes(given))
    throw std::invalid_argument("a block has not the items that it is said to have");
  made.block = a.data;
  return made;
}

inline std::vector<Candidates> all_candidates(PyObject* list, std::deque<ArrayView>& views, const UnionRound& round) {
  std::vector<Candidates> parts;
  const Py_ssize_t count = PyList_Size(list);
  if (count < 0) throw PythonError{};
  parts.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; i++) parts.push_back(candidates_of(PyList_GetItem(list, i), views, round));
  return parts;
}

// make(parts) -> whether the candidates suffice, and the batch is made of them; each as candidates_of() says, all with
// a total above 0. Those that are in the batch already come first.
inline PyObject* make(PyObject* self, PyObject* list) {
  return method<UnionDrawObject>(self, [&](UnionDrawObject& s) {
    std::deque<ArrayView> views;
    const std::vector<Candidates> parts = all_candidates(list, views, *s.round);
    const Unlocked others;
    return !parts.empty() && s.round->make(parts);
  });
}

// take_all(parts): makes the batch of all items of these blocks.
inline PyObject* take_all(PyObject* self, PyObject* list) {
  return method<UnionDrawObject>(self, [&](UnionDrawObject& s) {
    std::deque<ArrayView> views;
    const std::vector<Candidates> parts = all_candidates(list, views, *s.round);
    int64_t given = 0;
    for (const Candidates& part : parts) given += part.block ? part.given : 0;
    if (given != s.round->draw().items()) throw std::invalid_argument("the batch is of another number of items");
    {
      const Unlocked others;
      s.round->take_all(parts);
    }
    return Py_NewRef(Py_None);
  });
}

inline PyObject* list_of(const std::vector<int64_t>& counts) {
  Ref list(checked(PyList_New(0)));
  for (const int64_t count : counts)
    if (PyList_Append(list.get(), Ref(checked(PyLong_FromLongLong(count))).get())) throw PythonError{};
  return list.release();
}

inline std::vector<double> doubles(PyObject* list) {
  std::vector<double> values;
  const Py_ssize_t count = PyList_Size(list);
  values.reserve(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; i++) values.push_back(as_double(PyList_GetItem(list, i)));
  return values;
}

// asked(totals, n, slack) -> how many candidates to ask of each part.
inline PyObject* asked(PyObject*, PyObject* args) {
  return guarded([&] {
    PyObject* totals;
    long long n;
    double slack;
    if (!PyArg_ParseTuple(args, "O!Ld", &PyList_Type, &totals, &n, &slack)) throw PythonError{};
    return list_of(UnionDraw::asked(doubles(totals), n, slack));
  });
}

// most(totals, n) -> how many of n items may come from each part at most.
inline PyObject* most(PyObject*, PyObject* args) {
  return guarded([&] {
    PyObject* totals;
    long long n;
    if (!PyArg_ParseTuple(args, "O!L", &PyList_Type, &totals, &n)) throw PythonError{};
    return list_of(UnionDraw::most(doubles(totals), n));
  });
}

// Of each part the positions of those of its candidates that are in the batch, int64 [count].
inline PyObject* chosen(UnionDrawObject& s) {
  Ref list(checked(PyList_New(0)));
  for (const std::vector<int64_t>& which : s.round->draw().chosen()) {
    const auto* const bytes = reinterpret_cast<const char*>(which.data());
    const Ref part(checked(PyBytes_FromStringAndSize(bytes, static_cast<Py_ssize_t>(8 * which.size()))));
    if (PyList_Append(list.get(), part.get())) throw PythonError{};
  }
  return list.release();
}

// wait(ns) -> whether all is there, after that time at most. A signal ends the wait, too. Those that belong to the same
// DrawsHere are waited for in their order.
inline PyObject* wait(PyObject* self, PyObject* ns) {
  return method<UnionDrawObject>(self, [&](UnionDrawObject& s) {
    const int64_t until = monotonic_ns() + as_int(ns);
    const std::vector<std::shared_ptr<Reply>> replies = s.round->replies();  // others may give it up meanwhile
    const std::shared_ptr<Exchange> exchange = s.exchange;
    if (exchange) require_here(exchange);
    const auto left = [until] { return std::max<int64_t>(0, until - monotonic_ns()); };
    bool there = true;
    {
      const Unlocked others;
      for (const auto& reply : replies) there = there && (!reply || exchange->wait(*reply, left()));
    }
    if (there && s.draws) {
      there = s.draws->take(left());
      if (there && !s.draws->is_closed()) s.draws.reset();
    }
    if (there && !s.draws) {
      const std::shared_ptr<UnionRound> round = s.round;
      const Unlocked others;
      there = round->is_done(left() + 1);
    }
    if (!there && PyErr_CheckSignals()) throw PythonError{};
    return there;
  });
}

// Nobody writes to the batch from now on. What is drawn here later of the same iteration is not drawn either.
inline void abandon(UnionDrawObject& s) {
  if (!s.round->here()) return;  // it is the parent's
  if (s.draws) s.draws->close();
  s.draws.reset();
  const std::shared_ptr<UnionRound> round = s.round;
  const Unlocked others;
  round->abandon();
}

inline bool has_come(UnionDrawObject& s) {
  const auto replies = s.round->replies();
  return std::ranges::all_of(replies, [](const auto& reply) { return !reply || reply->is_there(); });
}
inline bool is_there(UnionDrawObject& s) {
  return s.round->here() && has_come(s) && (s.round->is_done() || (s.draws && s.draws->is_closed()));
}

// Whether all is there, and what was drawn here is taken in its turn.
inline bool is_taken(UnionDrawObject& s) {
  if (!is_there(s)) return false;
  if (s.draws && s.draws->take(0) && !s.draws->is_closed()) s.draws.reset();
  return !s.draws || s.draws->is_closed();
}

// What was drawn here, and not taken in its turn, has not happened.
inline bool is_made(UnionDrawObject& s) { return !s.draws && s.round->here() && s.round->is_made(); }

inline PyObject* drawn_from(UnionDrawObject& s) {
  const DrawnFrom& from = s.round->draw().drawn_from();
  return checked(Py_BuildValue("dLdd", from.total, static_cast<long long>(from.drawable), from.smallest, from.beta));
}

// The batch's memory, uint8 [bytes], where it is the body of the only answer: the same tensor each time. None: it is
// another's, or not made, or given up.
inline PyObject* block(UnionDrawObject& s) {
  if (!s.block.get()) {
    Body body = s.round->here() ? s.round->take_body() : Body();
    if (!body.data()) return Py_NewRef(Py_None);
    const auto bytes = static_cast<int64_t>(body.bytes());
    char* const data = body.data();
    s.block = Ref(make_tensor(data, Element::kU8, 1, &bytes, nullptr, BlockOwner(body.release())));
  }
  return Py_NewRef(s.block.get());
}

inline PyMethodDef methods[] = {
    {"asked", asked, METH_VARARGS | METH_STATIC, nullptr},
    {"most", most, METH_VARARGS | METH_STATIC, nullptr},
    {"make", make, METH_O, nullptr},
    {"take_all", take_all, METH_O, nullptr},
    {"wait", wait, METH_O, nullptr},
    {"abandon", plain_method<UnionDrawObject, [](UnionDrawObject& s) { abandon(s); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {
    {"is_there", attribute<UnionDrawObject, [](UnionDrawObject& s) { return is_there(s); }>, nullptr, nullptr, nullptr},
    {"is_made", attribute<UnionDrawObject, [](UnionDrawObject& s) { return is_made(s); }>, nullptr, nullptr, nullptr},
    {"block", attribute<UnionDrawObject, [](UnionDrawObject& s) { return block(s); }>, nullptr, nullptr, nullptr},
    {"chosen", attribute<UnionDrawObject, [](UnionDrawObject& s) { return chosen(s); }>, nullptr, nullptr, nullptr},
    {"drawn_from", attribute<UnionDrawObject, [](UnionDrawObject& s) { return drawn_from(s); }>, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<UnionDrawObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<UnionDrawObject>("torchreplay._C.UnionDraw", slots);

}  // namespace union_draw
}  // namespace torchreplay::py
