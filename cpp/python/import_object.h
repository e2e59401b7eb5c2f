// `_C.Import`: rows of a checkpoint on their way into a segment.
#pragma once

#include "checkpoint/import.h"
#include "python/row_export.h"

namespace torchreplay::py::importing {

// Keeps the segment, even if another thread closes it meanwhile.
struct ImportObject {
  std::shared_ptr<Learner> learner;
  std::shared_ptr<AttachedSegment> attached;
  std::optional<Import> import;

  Import& begun() {
    if (!import) throw std::runtime_error("the import is over");
    return *import;
  }
};

// Import(segment, head): of rows with keys below `head`; until it is over nobody sees any. BufferError when there are
// rows already, or another import. One that is let go of is abandoned.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject* segment;
    unsigned long long head;
    if (!PyArg_ParseTuple(args, "OK", &segment, &head)) throw PythonError{};
    if (head > kMaxHead) throw std::invalid_argument("the counters are out of range");
    auto state = std::make_unique<ImportObject>();
    auto& s = state_of<SegmentObject>(segment);
    state->attached = s.attached();
    state->learner = s.learner;
    state->attached->settle();
    {
      const Unlocked others;
      state->import.emplace(state->attached->memory(), head);
    }
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// issue(head): rows with keys below `head` are to come as well. BufferError when others have written meanwhile.
inline PyObject* issue(PyObject* self, PyObject* head) {
  return guarded([&] {
    Import& import = state_of<ImportObject>(self).begun();
    const uint64_t keys = as_uint(head);
    if (keys > kMaxHead) throw std::invalid_argument("the counters are out of range");
    {
      const Unlocked others;
      import.issue(keys);
    }
    return Py_NewRef(Py_None);
  });
}

// place([*fields, key, leaf, link, step, priority]): rows of export_rows().
inline PyObject* place(PyObject* self, PyObject* list) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    Import& import = s.begun();
    s.attached->require_fixed();
    const std::vector<FieldSpec>& specs = s.attached->fields.specs;
    const size_t columns = specs.size() + segment::kRowColumns;
    if (PyList_Size(list) != static_cast<Py_ssize_t>(columns)) throw std::invalid_argument("bad columns of rows");
    std::vector<ArrayView> views(columns);
    int64_t n = -1;
    for (size_t c = 0; c < columns; c++) {
      const bool opened = views[c].open(PyList_GetItem(list, static_cast<Py_ssize_t>(c)));
      const StridedArray& a = views[c].array;
      const Element element = c < specs.size() ? specs[c].element : segment::kRowElements[c - specs.size()];
      const int dims = c < specs.size() ? 1 + static_cast<int>(specs[c].shape.size()) : 1;
      bool fits = opened && a.dims == dims && a.element == element && is_dense(a, 0) && (n < 0 || a.shape[0] == n);
      for (int d = 1; fits && d < dims; d++) fits = a.shape[d] == specs[c].shape[static_cast<size_t>(d) - 1];
      if (!fits) throw std::invalid_argument("column " + std::to_string(c) + " of the rows has another type or shape");
      n = a.shape[0];
    }
    auto column = [&](size_t c) { return const_cast<char*>(views[c].array.data); };
    RowColumns rows;
    for (size_t f = 0; f < specs.size(); f++) rows.values.push_back(column(f));
    segment::place_row_columns(rows, [&](size_t c) { return column(specs.size() + c); });
    {
      const Unlocked others;
      import.place(static_cast<uint64_t>(n), rows);
    }
    return Py_NewRef(Py_None);
  });
}

// finish(counts, limiter, seed, stream, step): makes a buffer of what was placed, which draws on from there: in that
// stream, unless somebody else made it. `limiter` is the one that the counts are of.
inline PyObject* finish(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    Import& import = s.begun();
    unsigned long long n[8], seed, step, inserted_before, sampled_before, cleared;
    PyObject* limiter;
    unsigned int streams, stream;
    double max_raw, priority_change;
    long long grid, written;
    if (!PyArg_ParseTuple(args, "(KKKKKKKKIddKKLLK)OKIK", n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, &streams,
                          &max_raw, &priority_change, &inserted_before, &sampled_before, &grid, &written, &cleared,
                          &limiter, &seed, &stream, &step))
      throw PythonError{};
    const LimiterConfig counted_by = segment::parse_limiter(limiter);
    if (step >= kMaxDraws) throw std::invalid_argument("the counters are out of range");
    const Counts counts{n[0],
                        n[1],
                        n[2],
                        n[3],
                        n[4],
                        n[5],
                        n[6],
                        n[7],
                        streams,
                        static_cast<float>(max_raw),
                        priority_change,
                        inserted_before,
                        sampled_before,
                        {grid, written},
                        cleared};
    s.learner->finish(import, counts, counted_by, {seed, stream, step});
    s.import.reset();
    return Py_NewRef(Py_None);
  });
}

// abandon(): takes back what was placed, unless the import is over.
inline PyObject* abandon(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    if (!s.import) return Py_NewRef(Py_None);
    {
      const Unlocked others;
      s.import->abandon();
    }
    s.import.reset();
    return Py_NewRef(Py_None);
  });
}

inline PyMethodDef methods[] = {{"issue", issue, METH_O, nullptr},
                                {"place", place, METH_O, nullptr},
                                {"finish", finish, METH_VARARGS, nullptr},
                                {"abandon", abandon, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<ImportObject>)},
                              {Py_tp_methods, methods},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<ImportObject>("torchreplay._C.Import", slots);

}  // namespace torchreplay::py::importing
