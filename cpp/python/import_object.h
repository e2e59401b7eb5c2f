// `_C.Import`: rows of a checkpoint on their way into a segment.
#pragma once

#include "checkpoint/import.h"
#include "python/row_export.h"

namespace torchreplay::py::importing {

// Keeps the segment, even if another thread closes it meanwhile.
struct ImportObject {
  std::shared_ptr<Learner> learner;
  std::shared_ptr<AttachedSegment> attached;
  RunPlan expected;
  std::unique_ptr<Import> import;

  Import& begun() {
    if (!import) throw std::runtime_error("the import is over, or has not begun");
    return *import;
  }
};

inline uint64_t head_of(PyObject* head) {
  const uint64_t keys = as_uint(head);
  if (keys > kMaxHead) throw std::invalid_argument("the counters are out of range");
  return keys;
}

// Import(segment): until it has begun it does nothing.
inline int init(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject* segment;
    if (!PyArg_ParseTuple(args, "O", &segment)) throw PythonError{};
    auto state = std::make_unique<ImportObject>();
    auto& s = state_of<SegmentObject>(segment);
    state->attached = s.attached();
    state->learner = s.learner;
    install(self, state.release());
    return Py_NewRef(Py_None);
  }));
}

// Columns of rows, opened.
class GivenColumns {
 public:
  GivenColumns(PyObject* list, size_t expected) : views_(expected) {
    if (PyList_Size(list) != static_cast<Py_ssize_t>(expected)) throw std::invalid_argument("bad columns of rows");
    for (size_t c = 0; c < expected; c++)
      if (!views_[c].open(PyList_GetItem(list, static_cast<Py_ssize_t>(c)))) refuse(c);
  }

  // A column of elements of this type and shape: as many as rows, unless `any` says of any number.
  char* column(size_t c, Element element, const std::vector<int64_t>& shape = {}, bool any = false) {
    const StridedArray& a = views_[c].array;
    bool fits = a.dims == 1 + static_cast<int>(shape.size()) && a.element == element && is_dense(a, 0);
    for (size_t d = 0; fits && d < shape.size(); d++) fits = a.shape[d + 1] == shape[d];
    if (!fits || (!any && rows_ >= 0 && a.shape[0] != rows_)) refuse(c);
    if (!any) rows_ = a.shape[0];
    return const_cast<char*>(a.data);
  }

  uint64_t rows() const { return static_cast<uint64_t>(std::max<int64_t>(rows_, 0)); }
  uint64_t count(size_t c) const { return static_cast<uint64_t>(views_[c].array.shape[0]); }

 private:
  [[noreturn]] static void refuse(size_t c) {
    throw std::invalid_argument("column " + std::to_string(c) + " of the rows has another type or shape");
  }

  std::vector<ArrayView> views_;
  int64_t rows_ = -1;
};

// expect([key, *lengths], had) -> text: rows with ragged fields that are to come, when it has begun or issued more
// keys. They were in a buffer with `had` ragged_bytes. The text says what this one has too few of; None: it takes them.
inline PyObject* expect(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    PyObject* list;
    unsigned long long had;
    if (!PyArg_ParseTuple(args, "OK", &list, &had)) throw PythonError{};
    const Layout& layout = s.attached->memory().layout();
    GivenColumns given(list, 1 + layout.pages.groups);
    const auto* keys = reinterpret_cast<int64_t*>(given.column(0, Element::kI64));
    std::vector<const uint32_t*> lengths;
    lengths.reserve(layout.pages.groups);
    for (size_t g = 0; g < layout.pages.groups; g++)
      lengths.push_back(reinterpret_cast<uint32_t*>(given.column(1 + g, Element::kU32)));
    const std::string complaint = s.expected.expect(layout, given.rows(), keys, lengths, had);
    return complaint.empty() ? Py_NewRef(Py_None) : PyUnicode_FromString(complaint.c_str());
  });
}

// begin(head): rows with keys below `head` are to come; until it is over nobody sees any. BufferError when there are
// rows already, or another import. One that is let go of is abandoned.
inline PyObject* begin(PyObject* self, PyObject* head) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    const uint64_t keys = head_of(head);
    if (s.import) throw std::runtime_error("the import has begun");
    s.attached->settle();
    {
      const Unlocked others;
      s.import = std::make_unique<Import>(s.attached->memory(), keys, std::exchange(s.expected, {}));
    }
    return Py_NewRef(Py_None);
  });
}

// issue(head): rows with keys below `head` are to come as well. BufferError when others have written meanwhile.
inline PyObject* issue(PyObject* self, PyObject* head) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    Import& import = s.begun();
    const uint64_t keys = head_of(head);
    {
      const Unlocked others;
      import.issue(keys, std::exchange(s.expected, {}));
    }
    return Py_NewRef(Py_None);
  });
}

// left_out() -> [key, ...]: of the rows that have no place, since there are too few bytes for the values of all.
inline PyObject* left_out(PyObject* self, PyObject*) {
  return guarded([&] {
    const std::vector<int64_t> keys = state_of<ImportObject>(self).begun().left_out();
    KeyTensor tensor(static_cast<int64_t>(keys.size()));
    std::ranges::copy(keys, tensor.keys);
    const auto n = static_cast<int64_t>(keys.size());
    return tensor.release(1, &n);
  });
}

// Throws std::invalid_argument where lengths do not say how long the values of each row are.
inline void require_lengths(const FieldSpec& spec, uint64_t elements, uint64_t n, const uint32_t* lengths,
                            const int64_t* keys) {
  uint64_t end = 0;
  for (uint64_t i = 0; i < n; i++) {
    if (lengths[i] <= elements - end) {
      end += lengths[i];
      continue;
    }
    throw std::invalid_argument("the row with key " + std::to_string(keys[i]) + " has " + std::to_string(lengths[i]) +
                                " elements of '" + spec.path + "', and there are " + std::to_string(elements - end));
  }
  if (end != elements)
    throw std::invalid_argument("there are " + std::to_string(elements) + " elements of '" + spec.path +
                                "', and the lengths add up to " + std::to_string(end) + ": the last row has key " +
                                (n ? std::to_string(keys[n - 1]) : "none"));
}

// place([*fields, *lengths, key, leaf, link, step, priority]): rows of export_rows().
inline PyObject* place(PyObject* self, PyObject* list) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    Import& import = s.begun();
    const std::vector<FieldSpec>& specs = s.attached->fields.specs;
    const Layout& layout = s.attached->memory().layout();
    const size_t lengths = specs.size(), beside = lengths + layout.pages.groups;
    GivenColumns given(list, beside + segment::kRowColumns);
    RowColumns rows;
    for (size_t f = 0; f < specs.size(); f++)
      (specs[f].ragged() ? rows.ragged : rows.values)
          .push_back(given.column(f, specs[f].element, specs[f].shape, specs[f].ragged()));
    for (size_t g = lengths; g < beside; g++)
      rows.lengths.push_back(reinterpret_cast<uint32_t*>(given.column(g, Element::kU32)));
    segment::place_row_columns(rows, [&](size_t c) { return given.column(beside + c, segment::kRowElements[c]); });
    for (const size_t f : s.attached->fields.ragged)
      require_lengths(specs[f], given.count(f), given.rows(), rows.lengths[layout.ragged[specs[f].column].group],
                      rows.key);
    {
      const Unlocked others;
      import.place(given.rows(), rows);
    }
    return Py_NewRef(Py_None);
  });
}

// finish(counts, limiter, seed, stream, step, policy_version): makes a buffer of what was placed, which draws on from
// there: in that stream, unless somebody else made it. `limiter` is the one that the counts are of.
inline PyObject* finish(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<ImportObject>(self);
    Import& import = s.begun();
    unsigned long long n[8], more[7], seed, step, inserted_before, sampled_before, cleared;
    PyObject* limiter;
    unsigned int streams, stream;
    double max_raw, priority_change;
    long long grid, written, ages, largest_age, version;
    if (!PyArg_ParseTuple(args, "(KKKKKKKKIddKKLLKKKKKKKKLL)OKIKL", n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7,
                          &streams, &max_raw, &priority_change, &inserted_before, &sampled_before, &grid, &written,
                          &cleared, more, more + 1, more + 2, more + 3, more + 4, more + 5, more + 6, &ages,
                          &largest_age, &limiter, &seed, &stream, &step, &version))
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
                        cleared,
                        more[0],
                        more[1],
                        more[2],
                        more[3],
                        more[4],
                        more[5],
                        more[6],
                        ages,
                        largest_age};
    s.attached->raise_policy_version(version);
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

inline PyMethodDef methods[] = {
    {"expect", expect, METH_VARARGS, nullptr},  {"begin", begin, METH_O, nullptr},
    {"issue", issue, METH_O, nullptr},          {"left_out", left_out, METH_NOARGS, nullptr},
    {"place", place, METH_O, nullptr},          {"finish", finish, METH_VARARGS, nullptr},
    {"abandon", abandon, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot slots[] = {{Py_tp_init, reinterpret_cast<void*>(init)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<ImportObject>)},
                              {Py_tp_methods, methods},
                              {0, nullptr}};
inline PyType_Spec spec = type_spec<ImportObject>("torchreplay._C.Import", slots);

}  // namespace torchreplay::py::importing
