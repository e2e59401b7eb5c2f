// The calls of a queue: ending what was handed out, and saying who holds what.
#pragma once

#include "client/queue_state.h"
#include "python/learner_calls.h"

namespace torchreplay::py::segment {

// The keys given, each of an item that was handed out here and is not done; or for None all of these.
inline std::vector<int64_t> held_keys(SegmentObject& s, PyObject* given) {
  if (given == Py_None) return s.learner->held_keys();
  std::vector<int64_t> keys;
  read_keys(given, keys);
  if (const std::optional<size_t> bad = s.learner->first_not_held(keys))
    throw std::invalid_argument(
        "key " + std::to_string(keys[*bad]) + " at index " + std::to_string(*bad) +
        " is of no item that this process holds: it was never drawn here, or is committed or released already; "
        "nothing was changed");
  return keys;
}

// sample_groups(field, size, groups, min_size, timeout_ms, last, beta, deadline, loop, ends), as in GroupDraw and
// QueueDraw -> (batch, drawn_from, sizes of its groups, groups dropped, their items); or what explain() says in the
// place of drawn_from, beside no batch.
inline PyObject* sample_groups(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    expect_args("sample_groups", nargs, 10);
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    const Layout& layout = attached->memory().layout();
    const uint64_t place = as_uint(args[0]);
    const std::vector<FieldSpec>& specs = attached->fields.specs;
    if (place >= specs.size() || specs[place].ragged() || specs[place].element != Element::kI64 ||
        specs[place].nbytes != sizeof(int64_t) || layout.view.linked())
      throw std::invalid_argument("groups are of an int64 field of single rows");
    GroupDraw groups{.field = static_cast<uint32_t>(specs[place].column),
                     .size = as_count(args[1]),
                     .groups = as_count(args[2]),
                     .min_size = static_cast<int>(as_uint(args[3])),
                     .timeout_ms = as_int(args[4]),
                     .last = as_bool(args[5])};
    if (int64_t{groups.size} * groups.groups > kMostItems)
      throw std::invalid_argument("the groups have too many items");
    const int n = groups.size * groups.groups;
    BatchBuilder builder = attached->new_batch(n);
    BatchPointers pointers;
    builder.point(pointers);
    const DrawResult result =
        s.learner->draw(n, as_double(args[6]), {as_int(args[7]), true}, pointers, threads_for(attached->outputs(), n),
                        kNever, {.loop = as_uint(args[8]), .ends = as_uint(args[9]), .groups = &groups});
    builder.shrink(result.count);
    const bool drawn = result.outcome == Draw::kDone;
    const auto many = static_cast<int64_t>(groups.sizes.size());
    KeyTensor sizes(many);
    std::ranges::copy(groups.sizes, sizes.keys);
    const Ref batch(drawn ? make_batch(s, builder) : Py_NewRef(Py_None));
    const Ref told(drawn ? as_tuple(result.from) : explain(result.outcome, result.shortage));
    const Ref each(sizes.release(1, &many));
    return checked(Py_BuildValue("OOOKK", batch.get(), told.get(), each.get(), groups.dropped, groups.dropped_items));
  });
}

// commit(keys or None) -> how many items left, or come again: those of them that were still held.
inline PyObject* commit(PyObject* self, PyObject* keys) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    s.attached();
    return s.learner->commit(held_keys(s, keys), keys == Py_None);
  });
}

// release(keys or None) -> how many items are in their places again: those of them that were still held.
inline PyObject* release(PyObject* self, PyObject* keys) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    s.attached();
    return s.learner->release(held_keys(s, keys), keys == Py_None);
  });
}

// held_draws() -> (keys, draws): the items that were handed out here and are not done, and how often each was before.
inline PyObject* held_draws(PyObject* self, PyObject*) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    s.attached();
    const std::vector<int64_t> keys = s.learner->held_keys(), draws = s.learner->draws_of_held(keys);
    const int64_t n = std::ranges::count_if(draws, [](int64_t d) { return d >= 0; });
    KeyTensor held(n), done(n);
    for (size_t i = 0, k = 0; i < keys.size(); i++) {
      if (draws[i] < 0) continue;
      held.keys[k] = keys[i];
      done.keys[k++] = draws[i];
    }
    const Ref first(held.release(1, &n)), second(done.release(1, &n));
    return checked(PyTuple_Pack(2, first.get(), second.get()));
  });
}

// end_draws(keys, draws) -> how many items, of those that were done so often, are done once more.
inline PyObject* end_draws(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    expect_args("end_draws", nargs, 2);
    s.attached();
    std::vector<int64_t> keys, draws;
    read_keys(args[0], keys);
    read_keys(args[1], draws);
    if (keys.size() != draws.size()) throw std::invalid_argument("there are not as many draws as keys");
    return s.learner->end_draws(keys, draws);
  });
}

// adopt(keys, presence, loop) -> bool: the loop holds what the process of that presence has drawn; or not all of it is
// to be had.
inline PyObject* adopt(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    expect_args("adopt", nargs, 3);
    s.attached();
    std::vector<int64_t> keys;
    read_keys(args[0], keys);
    return s.learner->adopt(keys, static_cast<uint32_t>(as_uint(args[1])), as_uint(args[2]));
  });
}

// end_loop(loop): what that one got last is done.
inline PyObject* end_loop(PyObject* self, PyObject* loop) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    s.attached();
    s.learner->end_loop(as_uint(loop));
  });
}

// leave_loop(loop): what that one got last goes back.
inline PyObject* leave_loop(PyObject* self, PyObject* loop) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    s.attached();
    s.learner->leave_loop(as_uint(loop));
  });
}

// keep_loop(loop): what that one got last is held until commit() or release().
inline PyObject* keep_loop(PyObject* self, PyObject* loop) {
  return method<SegmentObject>(self, [&](SegmentObject& s) { s.learner->keep_loop(as_uint(loop)); });
}

// held_elsewhere(loop) -> items that this process holds, but the loop does not get by asking for more, nor by commit():
// those in other loops' last batches.
inline PyObject* held_elsewhere(PyObject* self, PyObject* loop) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    s.attached();
    return s.learner->held_by_other_loops(as_uint(loop));
  });
}

// [value of each], of what `convert` makes a new reference.
template <class Many, class Convert>
Ref list_of(const Many& many, const Convert& convert) {
  Ref list(checked(PyList_New(0)));
  for (const auto& one : many) {
    const Ref entry(checked(convert(one)));
    if (PyList_Append(list.get(), entry.get())) throw PythonError{};
  }
  return list;
}

// queue_state(count_streams) -> dict: the fields of QueueState; `holders` is a list of (pid, items, mine).
inline PyObject* queue_state(PyObject* self, PyObject* count_streams) {
  return on_segment(self, [&](AttachedSegment& segment) {
    const QueueState s = QueueState::of(segment, as_bool(count_streams));
    const uint32_t own = segment.memory().presence();
    const Ref holders = list_of(s.holders, [&](const ItemHolder& h) {
      return Py_BuildValue("iKO", h.pid, static_cast<unsigned long long>(h.items),
                           h.presence == own ? Py_True : Py_False);
    });
    const Ref writers = list_of(s.writers, [](int32_t pid) { return PyLong_FromLong(pid); });
    return checked(Py_BuildValue(
        "{sKsKsKsKsKsIsLsisOsOsKsOsKsKsKsKsKsKsOsKsKsKsOsO}", "to_draw", s.to_draw, "held", s.held, "lacking",
        s.lacking, "head", s.head, "limit", s.limit, "need", static_cast<unsigned>(s.oldest.need), "needed_key",
        static_cast<long long>(s.oldest.key), "needed_pid", s.oldest.pid, "lacks_pages",
        s.oldest.has_pages ? Py_True : Py_False, "holders", holders.get(), "open_streams", s.open_streams, "writers",
        writers.get(), "waiting", s.waiting, "pages_wanted", s.pages_wanted, "page_limit", s.page_limit, "pages_in_use",
        s.pages_in_use, "page_bytes", s.page_bytes, "longest_run", s.longest_run, "admits",
        s.admits ? Py_True : Py_False, "may_write", s.may_write, "may_admit", s.may_admit, "not_admitted",
        s.not_admitted, "has_other_publisher", s.has_other_publisher ? Py_True : Py_False, "has_lost_publisher",
        s.has_lost_publisher ? Py_True : Py_False));
  });
}

}  // namespace torchreplay::py::segment
