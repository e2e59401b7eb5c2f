// `_C.Prefetcher`: one iteration's batches, drawn by a native thread before they are asked for.
#pragma once

#include "client/prefetch_stream.h"
#include "python/learner_calls.h"

namespace torchreplay::py {

struct PrefetcherObject {
  PrefetcherObject(PyObject* object, SegmentObject& s, int size, uint64_t last_epoch, uint64_t loop)
      : owner(Ref::borrow(object)),
        attached(s.attached()),
        batch_size(size),
        stream(s.learner, size, last_epoch, loop) {}

  Ref owner;
  std::shared_ptr<AttachedSegment> attached;
  int batch_size;
  PrefetchStream<segment::BatchMemory> stream;

  SegmentObject& segment() { return state_of<SegmentObject>(owner.get()); }

  // `out` as for BatchMemory; the caller keeps it until the batch is taken or this is closed.
  void order(double beta, PyObject* out) {
    stream.order(beta, segment::BatchMemory(*attached, batch_size, out), threads_for(attached->outputs(), batch_size));
  }

  // The oldest batch; None when it is not drawn yet; or what explain() says.
  PyObject* take(int64_t ns) {
    auto taken = stream.take(ns);
    if (taken.outcome == Draw::kWait && !taken.shortage) return Py_NewRef(Py_None);
    if (taken.outcome != Draw::kDone || !taken.memory)
      return segment::explain(taken.outcome, taken.shortage.value_or(Shortage{}));
    segment::BatchMemory memory = std::move(*taken.memory);
    return memory.batch(segment(), taken.count);
  }

  // How many of the oldest batches are drawn, and not taken. The room of the first one says what was drawn into it.
  size_t ready() {
    const size_t n = stream.ready();
    if (n) stream.oldest().tell();
    return n;
  }

  // [(step, keys, weight, probability, drawn_from)]: the batches that are drawn and not taken, as bytes.
  PyObject* drawn() {
    Ref list(checked(PyList_New(0)));
    for (const Order& o : stream.drawn()) {
      const auto bytes = [&](const void* data, size_t each) {
        return Ref(checked(PyBytes_FromStringAndSize(static_cast<const char*>(data),
                                                     static_cast<Py_ssize_t>(each * static_cast<size_t>(o.n)))));
      };
      const Ref keys = bytes(o.out.keys, 8), weight = bytes(o.out.weight, 4), probability = bytes(o.out.probability, 4);
      const Ref from(as_tuple(o.drawn_from));
      const Ref entry(
          checked(Py_BuildValue("KOOOO", o.name.step, keys.get(), weight.get(), probability.get(), from.get())));
      if (PyList_Append(list.get(), entry.get())) throw PythonError{};
    }
    return list.release();
  }
};

namespace prefetcher {

// Prefetcher(segment, n, [last_epoch or None, loop]): as in DrawRules, and, of a queue, as in QueueDraw.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject* segment;
    int n;
    PyObject* last = Py_None;
    unsigned long long loop = 0;
    if (!PyArg_ParseTuple(args, "Oi|OK", &segment, &n, &last, &loop)) throw PythonError{};
    const uint64_t last_epoch = last == Py_None ? kNever : as_uint(last);
    install(self, new PrefetcherObject(segment, state_of<SegmentObject>(segment), n, last_epoch, loop));
    return Py_NewRef(Py_None);
  }));
}

// order(beta, out): has one more batch drawn; `out` as for sample().
inline PyObject* order(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<PrefetcherObject>(self, [&](PrefetcherObject& s) {
    expect_args("order", nargs, 2);
    s.order(as_double(args[0]), args[1]);
  });
}

// take(ns) -> the oldest batch ordered, which is that of its `out` where it had one; None when it is not drawn after
// that time; or what explain() says.
inline PyObject* take(PyObject* self, PyObject* ns) {
  return method<PrefetcherObject>(self, [&](PrefetcherObject& s) { return s.take(as_int(ns)); });
}

// next(beta, out) -> what take(0) returns after order(beta, out), or "stopped" when the buffer is.
inline PyObject* next(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<PrefetcherObject>(self, [&](PrefetcherObject& s) {
    expect_args("next", nargs, 2);
    if (s.segment().attached()->stopped()) return segment::explain(Draw::kStopped, {});
    s.order(as_double(args[0]), args[1]);
    return s.take(0);
  });
}

// accept(at_least): batches of a queue may be as short, from the next on that is drawn.
inline PyObject* accept(PyObject* self, PyObject* at_least) {
  return method<PrefetcherObject>(self, [&](PrefetcherObject& s) { s.stream.accept(as_count(at_least)); });
}

using Object = PrefetcherObject;
inline PyMethodDef methods[] = {
    {"order", fast(order), METH_FASTCALL, nullptr},
    {"take", take, METH_O, nullptr},
    {"next", fast(next), METH_FASTCALL, nullptr},
    {"accept", accept, METH_O, nullptr},
    {"ready", plain_method<Object, [](Object& s) { return s.ready(); }>, METH_NOARGS, nullptr},
    {"drawn", plain_method<Object, [](Object& s) { return s.drawn(); }>, METH_NOARGS, nullptr},
    {"close", plain_method<Object, [](Object& s) { s.stream.close(); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
// drawn_from -> (total, drawable, smallest, beta) of the batch taken last.
inline PyGetSetDef getset[] = {
    {"drawn_from", attribute<Object, [](Object& s) { return as_tuple(s.stream.drawn_from()); }>, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<PrefetcherObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<PrefetcherObject>("torchreplay._C.Prefetcher", slots);

}  // namespace prefetcher
}  // namespace torchreplay::py
