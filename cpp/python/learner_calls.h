// The calls of a learner: drawing a batch, and feeding TD errors back.
#pragma once

#include "python/attached_segment.h"
#include "python/out_batch.h"

namespace torchreplay::py::segment {

// key, weight, probability and age.
inline PyObject* const* reserved_names() {
  static PyObject* const names[] = {interned("key"), interned("weight"), interned("probability"), interned("age")};
  return names;
}

inline void sign(SegmentObject& s, PyObject* batch) {
  static PyObject* const source = interned("source");
  if (PyObject_SetAttr(batch, source, s.nonce.get())) throw PythonError{};
}

inline PyObject* make_batch(SegmentObject& s, BatchBuilder& builder) {
  Ref batch(checked(PyObject_CallNoArgs(s.batch_type.get())));
  sign(s, batch.get());
  builder.fill(batch.get());
  builder.fill_reserved(batch.get(), reserved_names());
  return batch.release();
}

// What a batch is drawn into: memory of ours; or that of the tensors of a batch that was given; or that of a room,
// which has such a batch and memory for values of any length.
class BatchMemory {
 public:
  // `out` is None, or a tuple of limits as for sample(), or a batch to draw into, or a room: the caller keeps both.
  BatchMemory(const AttachedSegment& segment, int n, PyObject* out) : segment_(&segment), n_(n) {
    if (out == Py_None || PyTuple_Check(out)) {
      builder_ = std::unique_ptr<BatchBuilder>(new BatchBuilder(segment.new_batch(n)));
      if (out != Py_None) builder_->limit(out);
    } else if (PyDict_Check(out)) {
      given_ = Ref::borrow(out);
      refuse_ragged(segment.outputs());
    } else {
      given_ = Ref(checked(PyObject_GetAttrString(out, "batch")));
      if (!PyDict_Check(given_.get())) throw std::invalid_argument("the batch of a room is no dict");
      room_ = std::make_unique<GivenRoom>(segment.outputs(), segment.ragged_outputs, out);
    }
  }

  // Whether exactly `n` items are drawn.
  bool takes_all() const { return given_ && !room_; }

  void point(BatchPointers& out) const {
    if (builder_) return builder_->point(out);
    const Fields& outputs = segment_->outputs();
    GivenBatch(outputs, segment_->has_versions(), n_, given_.get(), reserved_names()).point(out);
    if (!room_) return;
    out.ragged = room_->ragged();
    if (!segment_->linked()) keep_fixed(out, outputs);
  }

  // Says in the room, if there is one, what was drawn.
  void tell() const {
    if (room_) room_->tell();
  }

  // The batch, of so many items.
  PyObject* batch(SegmentObject& s, int64_t items) {
    if (builder_) {
      builder_->shrink(items);
      return make_batch(s, *builder_);
    }
    tell();
    sign(s, given_.get());
    return Py_NewRef(given_.get());
  }

 private:
  static void refuse_ragged(const Fields& outputs) {
    if (!outputs.ragged.empty())
      throw std::invalid_argument("out cannot take the batch: '" + outputs.specs[outputs.ragged[0]].path +
                                  "' is Ragged, and each batch of such is of another size; leave out= out");
  }

  const AttachedSegment* segment_;
  int n_;
  std::unique_ptr<BatchBuilder> builder_;
  Ref given_;
  std::unique_ptr<GivenRoom> room_;
};

// Why there is no batch: (word, inserted, needed, drawable, seen), the word being "wait", "barren", "stopped", "lapped"
// or "over". wait_rows() takes `seen`.
inline PyObject* explain(Draw outcome, const Shortage& shortage) {
  const char* const why = outcome == Draw::kWait        ? "wait"
                          : outcome == Draw::kBarren    ? "barren"
                          : outcome == Draw::kStopped   ? "stopped"
                          : outcome == Draw::kEpochOver ? "over"
                                                        : "lapped";
  return checked(
      Py_BuildValue("sKKKI", why, shortage.inserted, shortage.needed, shortage.drawable, unsigned{shortage.seen}));
}

// (batch, what it was drawn from).
inline PyObject* told(PyObject* batch, const DrawnFrom& from) {
  const Ref owned(batch), tree(as_tuple(from));
  return checked(PyTuple_Pack(2, owned.get(), tree.get()));
}

// Draws as sample() says. Calls give(batch, result) with the batch, or with none.
template <class Give>
PyObject* sample_and(const char* name, PyObject* self, PyObject* const* args, Py_ssize_t nargs, Give&& give) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    if (nargs != 5 && nargs != 7) expect_args(name, nargs, 4);
    const int n = as_count(args[0]);
    const uint64_t last_epoch = nargs == 5 ? as_uint(args[4]) : kNever;
    const QueueDraw queue = nargs == 7 ? QueueDraw{as_count(args[4]), as_uint(args[5]), as_uint(args[6])} : QueueDraw{};
    const double beta = as_double(args[1]);
    const Patience patience{as_int(args[2]), true};
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    const int threads = threads_for(attached->outputs(), n);
    BatchMemory memory(*attached, n, args[3]);
    if (memory.takes_all() && nargs == 5)
      throw std::invalid_argument("a batch of an epoch goes into memory of its own");
    if (memory.takes_all() && queue.at_least && queue.at_least < n)
      throw std::invalid_argument(
          "a batch that may be shorter goes into memory of its own: leave out= or at_least= out");
    BatchPointers pointers;
    memory.point(pointers);
    const DrawResult result = s.learner->draw(n, beta, patience, pointers, threads, last_epoch, queue);
    return give(result.outcome == Draw::kDone ? memory.batch(s, result.count) : nullptr, result);
  });
}

// sample(n, beta, deadline, out, [last_epoch] or [at_least, loop, ends]) -> batch, which is `out` where that is one, or
// what explain() says. `out` may be a tuple of the most elements of each ragged output, or a room, or None: see
// BatchMemory. Of a room the batch is that which it has, of which the items are told. `last_epoch` as in
// DrawRules, the others, of a queue, as in QueueDraw.
inline PyObject* sample(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return sample_and("sample", self, args, nargs, [](PyObject* batch, const DrawResult& result) {
    return batch ? batch : explain(result.outcome, result.shortage);
  });
}

// sample_told(...) as sample() -> (batch, drawn_from), the latter as as_tuple() says; or (None, what explain() says).
inline PyObject* sample_told(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return sample_and("sample_told", self, args, nargs, [](PyObject* batch, const DrawResult& result) {
    if (batch) return told(batch, result.from);
    const Ref why(explain(result.outcome, result.shortage));
    return checked(PyTuple_Pack(2, Py_None, why.get()));
  });
}

// Keys as users give them; throws std::invalid_argument.
inline void read_keys(PyObject* o, std::vector<int64_t>& key) {
  ArrayView keys;
  const bool opened = keys.open_anything(o);
  const bool none = opened && keys.array.dims == 1 && keys.array.shape[0] == 0;  // an empty list says no dtype
  const bool integers =
      keys.array.element > Element::kBool && keys.array.element <= Element::kI64 && keys.array.element != Element::kU64;
  if (!none && (!opened || keys.array.dims != 1 || !integers))
    throw std::invalid_argument(
        "the keys are " + describe(o, keys, opened) +
        ", expected int64 of shape (n,): batch['key'], what extend returned, or a list of keys of append" +
        (opened && keys.array.dims == 2 ? " (a DataLoader adds a dimension unless batch_size=None)" : ""));
  if (keys.array.shape[0] > kMostItems)
    throw std::invalid_argument("got " + std::to_string(keys.array.shape[0]) + " keys, expected at most " +
                                std::to_string(kMostItems) + ": give them in parts");
  key.resize(static_cast<size_t>(keys.array.shape[0]));
  if (key.empty()) return;  // an empty array may have no address
  if (keys.array.element == Element::kI64 && is_dense(keys.array, 0))
    std::memcpy(key.data(), keys.array.data, 8 * key.size());
  else
    copy_converted(reinterpret_cast<char*>(key.data()), Element::kI64, keys.array.data, keys.array, 0);
}

[[noreturn]] inline void refuse(const BadKey& bad) {
  throw std::invalid_argument("key " + std::to_string(bad.key) + " at index " + std::to_string(bad.index) +
                              " was never issued by this buffer: " + bad.expected() + "; nothing was changed" +
                              (bad.key == -1 ? ". Where rows_of() says -1 there is no row: leave those out" : ""));
}

// checked_keys(keys) -> them as an int64 tensor of its own memory, if update() would take them.
inline PyObject* checked_keys(PyObject* self, PyObject* keys) {
  return on_segment(self, [&](AttachedSegment& segment) {
    std::vector<int64_t> key;
    read_keys(keys, key);
    const auto n = static_cast<int64_t>(key.size());
    if (const std::optional<BadKey> bad = unissued(segment.memory(), n, key.data())) refuse(*bad);
    KeyTensor tensor(n);
    std::ranges::copy(key, tensor.keys);
    return tensor.release(1, &n);
  });
}

// unissued(keys) -> the index of the first that was never issued, or None.
inline PyObject* unissued_key(PyObject* self, PyObject* keys) {
  return on_segment(self, [&](AttachedSegment& segment) {
    std::vector<int64_t> key;
    read_keys(keys, key);
    const std::optional<BadKey> bad = unissued(segment.memory(), static_cast<int64_t>(key.size()), key.data());
    return bad ? checked(PyLong_FromLongLong(bad->index)) : Py_NewRef(Py_None);
  });
}

// gather(keys, beta, step) -> (batch, drawn_from) of the items anchored there that can be drawn; `step`: of this
// process's draw whose chances they take again, or None.
inline PyObject* gather(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    expect_args("gather", nargs, 3);
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    std::vector<int64_t> keys;
    read_keys(args[0], keys);
    const double beta = as_double(args[1]);
    std::optional<uint64_t> step;
    if (args[2] != Py_None) step = as_uint(args[2]);
    const auto n = static_cast<int64_t>(keys.size());
    BatchBuilder builder = attached->new_batch(n);
    BatchPointers pointers;
    builder.point(pointers);
    DrawnFrom from;
    builder.shrink(s.learner->gather(attached, keys, beta, step, pointers, threads_for(attached->outputs(), n), from));
    return told(make_batch(s, builder), from);
  });
}

// settle(deadline): what this process has fed back is applied, unless that takes longer.
inline PyObject* settle(PyObject* self, PyObject* deadline) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    const Patience patience{as_int(deadline)};
    if (const std::shared_ptr<AttachedSegment> attached = s.segment) attached->try_settle_feedback(patience);
  });
}

// What to do about TD errors of a shape that a column of values leads to; as validation.py's `column_hint`.
inline std::string column_hint(const StridedArray& td, int64_t n) {
  if (td.dims != 2 || td.shape[0] != n) return "";
  if (td.shape[1] == 1) return "; give td.squeeze(-1)";
  if (td.shape[1] != n) return "";
  const std::string size = std::to_string(n), square = "[" + size + ", " + size + "]";
  return "; values [" + size + ", 1] and targets [" + size + "] were broadcast to " + square +
         ": give value.squeeze(-1) - target, and look at the loss, which has the same mistake";
}

// The TD errors of n items, finite ones.
inline void read_td(PyObject* o, int64_t n, std::vector<double>& td) {
  ArrayView v;
  const bool opened = v.open_anything(o);
  if (!opened || v.array.dims != 1 || v.array.shape[0] != n)
    throw std::invalid_argument("the TD errors are " + describe(o, v, opened) +
                                ", expected one number for each key: shape (" + std::to_string(n) + ",)" +
                                (opened ? column_hint(v.array, n) : ""));
  td.resize(static_cast<size_t>(n));
  copy_converted(reinterpret_cast<char*>(td.data()), Element::kF64, v.array.data, v.array, 0);
  int64_t bad = 0, first = -1;
  for (int64_t i = 0; i < n; i++)
    if (!std::isfinite(td[i])) {
      if (first < 0) first = i;
      bad++;
    }
  if (bad)
    throw std::invalid_argument(std::to_string(bad) + " of " + std::to_string(n) +
                                " TD errors are NaN or infinite, the first at index " + std::to_string(first) +
                                ": nothing was applied; look for a diverged loss");
}

// The keys of a batch that is signed with this nonce; nullptr for others.
inline PyObject* signed_keys(PyObject* batch, PyObject* nonce) {
  static PyObject* const source = interned("source");
  const Ref signature(PyObject_GetAttr(batch, source));
  PyErr_Clear();
  if (signature.get() != nonce) return nullptr;
  PyObject* const keys = PyDict_GetItemWithError(batch, reserved_names()[0]);
  if (!keys && PyErr_Occurred()) throw PythonError{};
  return keys;
}

// The keys of a batch that this object has signed. Objects that are no dicts are returned as they are: they may be
// keys. nullptr for other batches and dicts.
inline PyObject* keys_of(SegmentObject& s, PyObject* o) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(o)) == s.batch_type.get()) return signed_keys(o, s.nonce.get());
  return PyDict_Check(o) ? nullptr : o;
}

// update(batch_or_keys, td) -> True: the TD errors are applied, or handed to the thread that draws ahead for the
// caller; False, with nothing done, for a batch that this object has not signed, or another dict.
inline PyObject* update(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    expect_args("update", nargs, 2);
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    PyObject* const found = keys_of(s, args[0]);
    if (!found) return false;
    const Ref keys = Ref::borrow(found);  // reading them may run code that changes the batch
    Feedback feedback = std::exchange(s.feedback, {});
    read_keys(keys.get(), feedback.keys);
    read_td(args[1], static_cast<int64_t>(feedback.keys.size()), feedback.td);
    const std::optional<BadKey> bad = s.learner->update(attached, feedback);
    if (feedback.keys.capacity() <= Feedback::kKept) s.feedback = std::move(feedback);
    if (bad) refuse(*bad);
    return true;
  });
}

// wait_rows(seen, ns): sleeps until a writer signals rows, at most `ns`; not at all when one has since the draw that
// said `seen`.
inline PyObject* wait_rows(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    expect_args("wait_rows", nargs, 2);
    s.attached();
    const std::shared_ptr<Learner> learner = s.learner;  // another thread may close it
    learner->wait_for_rows(static_cast<uint32_t>(as_uint(args[0])), as_int(args[1]));
  });
}

// epoch(begin) -> (how many epochs have ended, items that the one under way has not drawn, all items), absorbed to now;
// with `begin`, another one has begun where nothing was due.
inline PyObject* epoch(PyObject* self, PyObject* begin) {
  return on_segment(self, [&](AttachedSegment& segment) {
    const EpochState e = segment.epoch(begin == Py_True);
    return checked(Py_BuildValue("KKK", e.ended, e.due, e.items));
  });
}

// give_back(keys): nobody got those of them that the epoch under way has drawn.
inline PyObject* give_back(PyObject* self, PyObject* keys) {
  return on_segment(self, [&](AttachedSegment& segment) {
    std::vector<int64_t> key;
    read_keys(keys, key);
    if (unissued(segment.memory(), static_cast<int64_t>(key.size()), key.data())) return;  // of another buffer
    segment.give_back(key);
  });
}

// draws_of(keys) -> how often each item was drawn, where draws are counted; 0 of those that are gone.
inline PyObject* draws_of(PyObject* self, PyObject* keys) {
  return on_segment(self, [&](AttachedSegment& segment) {
    std::vector<int64_t> key;
    read_keys(keys, key);
    const std::vector<int64_t> draws = segment.draws_of(key);
    const auto n = static_cast<int64_t>(draws.size());
    KeyTensor counted(n);
    std::ranges::copy(draws, counted.keys);
    return counted.release(1, &n);
  });
}

// raise_draws(keys, draws): these items were drawn so often at the least, where draws are counted.
inline PyObject* raise_draws(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return on_segment(self, [&](AttachedSegment& segment) {
    expect_args("raise_draws", nargs, 2);
    std::vector<int64_t> keys, draws;
    read_keys(args[0], keys);
    read_keys(args[1], draws);
    if (keys.size() != draws.size()) throw std::invalid_argument("there are not as many draws as keys");
    if (unissued(segment.memory(), static_cast<int64_t>(keys.size()), keys.data())) return;  // of another buffer
    segment.raise_draws(keys, draws);
  });
}

// refresh(deadline, until_stopped) -> rows: absorbs, lets the limiter see what came, and counts the rows held; None
// when the end of the buffer ended a wait for the lock.
inline PyObject* refresh(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return on_segment(self, [&](AttachedSegment& segment) {
    expect_args("refresh", nargs, 2);
    try {
      return to_python(segment.refresh({as_int(args[0]), args[1] == Py_True}));
    } catch (const StoppedMeanwhile&) {
      return Py_NewRef(Py_None);
    }
  });
}

// admit_writers_of(other, n) -> True: a thread that writes to the segment `other` waits here, and `n` items more than
// there are are admitted, until withdraw() or the next draw.
inline PyObject* admit_writers_of(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return on_segment(self, [&](AttachedSegment& segment) {
    expect_args("admit_writers_of", nargs, 2);
    if (Py_TYPE(args[0]) != Py_TYPE(self)) throw std::invalid_argument("expected a Segment");
    return segment.admit_writers_of(state_of<SegmentObject>(args[0]).attached(), as_uint(args[1]));
  });
}

}  // namespace torchreplay::py::segment
