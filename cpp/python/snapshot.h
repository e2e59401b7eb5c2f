// Rows out of a segment and into one, as tensors: for checkpoints.
#pragma once

#include "../import.h"
#include "attached.h"
#include "flow.h"

namespace torchreplay::py::segment {

// Beside the fields: key, leaf, link, step, priority.
inline constexpr Element kRowElements[] = {Element::kI64, Element::kF32, Element::kI64, Element::kI32, Element::kF32};
inline constexpr size_t kRowColumns = 5;

// export_rows(from, to) -> [*fields, key, leaf, link, step, priority]: tensors of the n rows in those slots.
inline PyObject* export_rows(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    attached->settle();
    unsigned long long from, to;
    if (!PyArg_ParseTuple(args, "KK", &from, &to)) throw PythonError{};
    if (from >= to || to > m.capacity()) throw std::invalid_argument("bad range of slots");
    const std::vector<FieldSpec>& specs = attached->fields.specs;
    const size_t columns = specs.size() + kRowColumns;
    std::vector<size_t> offset;
    size_t bytes = 0;
    for (size_t c = 0; c < columns; c++) {
      const uint64_t each = c < specs.size() ? specs[c].nbytes : item_size(kRowElements[c - specs.size()]);
      offset.push_back(bytes);
      bytes += round_up(each * (to - from), kLine);
    }
    // One owner for each tensor, and one for this call.
    BlockOwner block(Block::make(bytes, static_cast<int>(columns) + 1));
    char* data = block.block->data();
    RowColumns rows;
    for (size_t f = 0; f < specs.size(); f++) rows.values.push_back(data + offset[f]);
    const size_t* at = offset.data() + specs.size();
    rows.key = reinterpret_cast<int64_t*>(data + at[0]);
    rows.leaf = reinterpret_cast<float*>(data + at[1]);
    rows.link = reinterpret_cast<int64_t*>(data + at[2]);
    rows.step = reinterpret_cast<int32_t*>(data + at[3]);
    rows.priority = reinterpret_cast<float*>(data + at[4]);
    int64_t n;
    {
      WithoutGil unlocked;
      n = static_cast<int64_t>(Snapshot(m).copy_out(from, to, rows));
    }
    Ref list(checked(PyList_New(0)));
    for (size_t c = 0; c < columns; c++) {
      int64_t shape[StridedArray::kMaxDims + 1] = {n};
      int dims = 1;
      if (c < specs.size())
        for (int64_t size : specs[c].shape) shape[dims++] = size;
      const Element element = c < specs.size() ? specs[c].element : kRowElements[c - specs.size()];
      Ref tensor(make_tensor(data + offset[c], element, dims, shape, nullptr, BlockOwner(block.block)));
      if (PyList_Append(list.get(), tensor.get())) throw PythonError{};
    }
    return list.release();
  });
}

// begin_import(): nobody sees rows before finish_import() or abandon_import(). BufferError when there are some, or an
// import is under way.
inline PyObject* begin_import(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    attached->settle();
    {
      WithoutGil unlocked;
      Import(m).begin();
    }
    return Py_NewRef(Py_None);
  });
}

// import_rows([*fields, key, leaf, link, step, priority]): places rows of export_rows(). BufferError when others have
// written rows meanwhile.
inline PyObject* import_rows(PyObject* self, PyObject* list) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    const std::vector<FieldSpec>& specs = attached->fields.specs;
    const size_t columns = specs.size() + kRowColumns;
    if (PyList_Size(list) != static_cast<Py_ssize_t>(columns)) throw std::invalid_argument("bad columns of rows");
    std::vector<ArrayView> views(columns);
    int64_t n = -1;
    for (size_t c = 0; c < columns; c++) {
      const bool opened = views[c].open(PyList_GetItem(list, static_cast<Py_ssize_t>(c)));
      const StridedArray& a = views[c].array;
      const Element element = c < specs.size() ? specs[c].element : kRowElements[c - specs.size()];
      const int dims = c < specs.size() ? 1 + static_cast<int>(specs[c].shape.size()) : 1;
      bool fits = opened && a.dims == dims && a.element == element && is_dense(a, 0) && (n < 0 || a.shape[0] == n);
      for (int d = 1; fits && d < dims; d++) fits = a.shape[d] == specs[c].shape[static_cast<size_t>(d) - 1];
      if (!fits) throw std::invalid_argument("column " + std::to_string(c) + " of the rows has another type or shape");
      n = a.shape[0];
    }
    auto column = [&](size_t c) { return const_cast<char*>(views[c].array.data); };
    RowColumns rows;
    for (size_t f = 0; f < specs.size(); f++) rows.values.push_back(column(f));
    rows.key = reinterpret_cast<int64_t*>(column(specs.size()));
    rows.leaf = reinterpret_cast<float*>(column(specs.size() + 1));
    rows.link = reinterpret_cast<int64_t*>(column(specs.size() + 2));
    rows.step = reinterpret_cast<int32_t*>(column(specs.size() + 3));
    rows.priority = reinterpret_cast<float*>(column(specs.size() + 4));
    for (int64_t i = 0; i < n; i++)
      if (rows.key[i] < 0 || static_cast<uint64_t>(rows.key[i]) >= kMaxKeys)
        throw std::invalid_argument("a key is out of range");
    {
      WithoutGil unlocked;
      Import(m).place(static_cast<uint64_t>(n), rows);
    }
    return Py_NewRef(Py_None);
  });
}

// abandon_import(): takes back the rows that import_rows() has placed, unless finish_import() has made them a buffer.
inline PyObject* abandon_import(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    {
      WithoutGil unlocked;
      Import(m).abandon();
    }
    return Py_NewRef(Py_None);
  });
}

// counts() -> (head, inserted, sampled, updated, stale_updates, unready_updates, draws, evicted_unsampled, streams,
// max_raw, priority_change, inserted_before, sampled_before).
inline PyObject* counts(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    attached->settle();
    Counters c;
    {
      WithoutGil unlocked;
      c = Snapshot(m).counters();
    }
    return checked(Py_BuildValue("KKKKKKKKIddKK", c.head, c.inserted, c.sampled, c.updated, c.stale_updates,
                                 c.unready_updates, c.draws, c.evicted_unsampled, c.streams, c.max_raw,
                                 c.priority_change, c.inserted_before, c.sampled_before));
  });
}

// finish_import(counts, seed, step, limiter): makes a buffer of what import_rows() has placed, which draws on from
// there. `limiter` is None, or that of the buffer if the counts are of another one. BufferError as of import_rows().
inline PyObject* finish_import(PyObject* self, PyObject* args) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    unsigned long long n[8], seed, step, inserted_before, sampled_before;
    PyObject* other;
    unsigned int streams;
    double max_raw, priority_change;
    if (!PyArg_ParseTuple(args, "(KKKKKKKKIddKK)KKO", n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7, &streams,
                          &max_raw, &priority_change, &inserted_before, &sampled_before, &seed, &step, &other))
      throw PythonError{};
    std::optional<LimiterConfig> limiter;
    if (other != Py_None) limiter = parse_limiter(other);
    if (n[0] > kMaxKeys || !(max_raw >= 0) || !std::isfinite(max_raw) || !(priority_change >= 0) ||
        !std::isfinite(priority_change))
      throw std::invalid_argument("the counters are out of range");
    {
      WithoutGil unlocked;
      Import(m).finish({n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], streams, static_cast<float>(max_raw),
                        priority_change, inserted_before, sampled_before},
                       limiter ? &*limiter : nullptr);
    }
    m.header().seed = seed;
    s.become_learner();  // in the stream that goes on
    s.next_draw.seed = seed;
    s.next_draw.step = step + s.ahead;
    return Py_NewRef(Py_None);
  });
}

}  // namespace torchreplay::py::segment
