// `_C.Prefetcher`: one iteration's batches, drawn by a native thread before they are asked for.
#pragma once

#include "python/learner.h"

namespace torchreplay::py {

// A batch that was ordered, and the memory it is drawn into: our own, or that of the tensors of a batch that was given.
struct Ordered {
  std::unique_ptr<BatchBuilder> builder;
  Ref given;
  DrawName name;
  double beta;
};

class PrefetcherObject {
 public:
  PrefetcherObject(PyObject* segment, int n)
      : owner_(Ref::borrow(segment)), attached_(draws().attached), batch_size_(n) {
    draws().memory();
  }
  ~PrefetcherObject() {
    try {
      close();
    } catch (...) {  // the thread has ended; nobody is left to hear of it
    }
  }
  PrefetcherObject(const PrefetcherObject&) = delete;

  // `out` is None, or a batch to draw into, whose tensors the caller keeps until it is taken or this is closed.
  void order(double beta, PyObject* out) {
    refuse_others();
    follow_fork();
    SegmentObject& s = draws();
    s.memory();
    s.become_learner();
    if (!engine_) {  // what was fed back in another iteration comes before the draws of this one
      const InUse mine(used_in_);
      attached_->try_settle_feedback({.deadline = monotonic_ns() + kSettleNs, .until_stopped = true});
      engine_ = attached_->draw_ahead();
    }
    Ordered o{nullptr, Ref(), s.next_draw, beta};
    Order order{batch_size_, beta, o.name, {}};
    if (out == Py_None) {
      o.builder = std::make_unique<BatchBuilder>(attached_->outputs(), batch_size_);
      o.builder->point(order.out);
    } else {
      GivenBatch(attached_->outputs(), batch_size_, out, segment::reserved_names()).point(order.out);
      o.given = Ref::borrow(out);
    }
    order.threads = threads_for(order.out);
    orders_.push_back(std::move(o));
    try {
      engine_->order(std::move(order));
    } catch (...) {
      orders_.pop_back();
      throw;
    }
    s.next_draw.step++;
    s.ahead++;
  }

  // The engine's take(), and the batch when there is one.
  PyObject* take(int64_t ns) {
    refuse_others();
    follow_fork();
    Header& h = draws().header();
    if (orders_.empty()) throw std::logic_error("nothing is ordered");
    std::optional<Shortage> shortage;
    Draw outcome;
    if (ns == 0) {
      outcome = engine_->take(0, shortage);
    } else {
      const InUse mine(used_in_);
      const WithoutGil unlocked;
      outcome = engine_->take(ns, shortage);
    }
    if (outcome == Draw::kWait && !shortage) return Py_NewRef(Py_None);
    if (outcome != Draw::kDone) return segment::explain(outcome, shortage.value_or(Shortage{}));
    h.taken_ahead.fetch_add(1, std::memory_order_relaxed);
    h.missed.fetch_add(engine_->missed_updates(), std::memory_order_relaxed);
    drawn_from_ = engine_->drawn_from();
    draws().note_draw(batch_size_);
    const std::unique_ptr<BatchBuilder> builder = std::move(orders_.front().builder);
    Ref given = std::move(orders_.front().given);
    forget(1);
    if (builder) return segment::make_batch(draws(), *builder);
    segment::sign(draws(), given.get());
    return given.release();
  }

  // order() and take(0); "stopped" when the buffer is.
  PyObject* next(double beta, PyObject* out) {
    if (draws().header().stopped.load(std::memory_order_relaxed)) return segment::explain(Draw::kStopped, {});
    order(beta, out);
    return take(0);
  }

  // How many of the oldest batches are drawn, and not taken.
  size_t ready() { return engine_ && engine_->here() ? engine_->finished() : 0; }

  // Of the batch taken last.
  PyObject* drawn_from() const { return as_tuple(drawn_from_); }

  // [(step, keys, weight, probability, drawn_from)]: the batches that are drawn and not taken, as bytes.
  PyObject* drawn() {
    Ref list(checked(PyList_New(0)));
    if (!engine_ || !engine_->here()) return list.release();
    refuse_others();
    const std::shared_ptr<Prefetcher> engine = engine_;  // close() may run in another thread meanwhile
    attached_->settle();
    for (const Order& o : engine->drawn()) {
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

  // Ends the thread, unless another one is at that. The draws that nobody took have not happened, unless others of this
  // process followed them.
  void close() {
    if (now(closing_in_)) return;
    refuse_others();
    if (engine_ && engine_->here()) {
      const InUse mine(used_in_), ending(closing_in_);
      const WithoutGil unlocked;
      engine_->close();
    }
    abandon();
    if (!orders_.empty()) draws().unname(orders_.back().name, orders_.size());
    forget(orders_.size());
  }

 private:
  // Notes in which process something goes on: its fork generation + 1.
  class InUse {
   public:
    explicit InUse(uint64_t& where) : where_(where) { where_ = fork_generation.load(std::memory_order_relaxed) + 1; }
    ~InUse() { where_ = 0; }
    InUse(const InUse&) = delete;

   private:
    uint64_t& where_;
  };
  static bool now(uint64_t where) { return where == fork_generation.load(std::memory_order_relaxed) + 1; }

  void refuse_others() const {
    if (now(used_in_))
      throw std::runtime_error(now(closing_in_)
                                   ? "another thread ends this iteration"
                                   : "another thread waits for a batch of this iteration: it is for one thread");
  }

  SegmentObject& draws() { return state_of<SegmentObject>(owner_.get()); }

  // In a forked child the thread is missing, and what it was drawing is the parent's: all is ordered again.
  void follow_fork() {
    if (!engine_ || engine_->here()) return;
    abandon();
    const std::deque<Ordered> again = std::exchange(orders_, std::deque<Ordered>());
    SegmentObject& s = draws();
    s.ahead -= std::min<uint64_t>(s.ahead, again.size());
    for (const Ordered& o : again) order(o.beta, o.given ? o.given.get() : Py_None);
  }

  // The locks of an engine whose thread is in another process may be held for ever: it is never destroyed.
  void abandon() {
    if (engine_ && !engine_->here()) static_cast<void>(new std::shared_ptr<Prefetcher>(engine_));
    engine_.reset();
  }

  void forget(size_t n) {
    SegmentObject& s = draws();
    s.ahead -= std::min<uint64_t>(s.ahead, n);  // none are left after a fork
    orders_.erase(orders_.begin(), orders_.begin() + static_cast<ptrdiff_t>(n));
  }

  Ref owner_;
  std::shared_ptr<AttachedSegment> attached_;
  int batch_size_;
  uint64_t used_in_ = 0, closing_in_ = 0;  // by a thread without the interpreter lock; of those by one that closes it
  std::shared_ptr<Prefetcher> engine_;
  std::deque<Ordered> orders_;
  DrawnFrom drawn_from_;
};

namespace ahead {

// Prefetcher(segment, n)
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject* segment;
    int n;
    if (!PyArg_ParseTuple(args, "Oi", &segment, &n)) throw PythonError{};
    install(self, new PrefetcherObject(segment, n));
    return Py_NewRef(Py_None);
  }));
}

// order(beta, out): has one more batch drawn, into the tensors of the batch `out` unless that is None.
inline PyObject* order(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("order", nargs, 2);
    state_of<PrefetcherObject>(self).order(as_double(args[0]), args[1]);
    return Py_NewRef(Py_None);
  });
}

// take(ns) -> the oldest batch ordered, which is its `out` where it had one; None when it is not drawn after that time;
// or what explain() says.
inline PyObject* take(PyObject* self, PyObject* ns) {
  return guarded([&] { return state_of<PrefetcherObject>(self).take(as_int(ns)); });
}

// next(beta, out) -> what take(0) returns after order(beta, out), or "stopped" when the buffer is.
inline PyObject* next(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&] {
    expect_args("next", nargs, 2);
    return state_of<PrefetcherObject>(self).next(as_double(args[0]), args[1]);
  });
}

// ready() -> how many of the oldest batches are drawn, and not taken.
inline PyObject* ready(PyObject* self, PyObject*) {
  return guarded([&] { return checked(PyLong_FromSize_t(state_of<PrefetcherObject>(self).ready())); });
}

// drawn() -> [(step, keys, weight, probability, drawn_from)] of the batches drawn and not taken.
inline PyObject* drawn(PyObject* self, PyObject*) {
  return guarded([&] { return state_of<PrefetcherObject>(self).drawn(); });
}

// drawn_from -> (total, drawable, smallest, beta) of the batch taken last.
inline PyObject* get_drawn_from(PyObject* self, void*) {
  return guarded([&] { return state_of<PrefetcherObject>(self).drawn_from(); });
}

inline PyObject* close(PyObject* self, PyObject*) {
  return guarded([&] {
    state_of<PrefetcherObject>(self).close();
    return Py_NewRef(Py_None);
  });
}

inline PyMethodDef methods[] = {
    {"order", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(order)), METH_FASTCALL, nullptr},
    {"take", take, METH_O, nullptr},
    {"next", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(next)), METH_FASTCALL, nullptr},
    {"ready", ready, METH_NOARGS, nullptr},
    {"drawn", drawn, METH_NOARGS, nullptr},
    {"close", close, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef getset[] = {{"drawn_from", get_drawn_from, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<PrefetcherObject>)},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<PrefetcherObject>("torchreplay._C.Prefetcher", slots);

}  // namespace ahead
}  // namespace torchreplay::py
