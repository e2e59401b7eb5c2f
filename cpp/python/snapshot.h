// Rows out of a segment, as tensors: for checkpoints.
#pragma once

#include <tuple>

#include "../snapshot.h"
#include "attached.h"
#include "flow.h"

namespace torchreplay::py::segment {

// Beside the fields: key, leaf, link, step, priority.
inline constexpr Element kRowElements[] = {Element::kI64, Element::kF32, Element::kI64, Element::kI32, Element::kF32};
inline constexpr size_t kRowColumns = 5;

// export_rows(from, to) -> [*fields, key, leaf, link, step, priority]: tensors of the n rows in those slots.
// BufferError while it is being restored.
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

// counts() -> ((head, inserted, sampled, updated, stale_updates, unready_updates, draws, evicted_unsampled, streams,
// max_raw, priority_change, inserted_before, sampled_before, grid, written), limiter), both of one moment. BufferError
// while it is being restored.
inline PyObject* counts(PyObject* self, PyObject*) {
  return guarded([&] {
    auto& s = state_of<SegmentState>(self);
    const std::shared_ptr<Attached> attached = s.attached;
    SegmentMemory& m = s.memory();
    attached->settle();
    Counts c;
    LimiterConfig limiter;
    {
      WithoutGil unlocked;
      std::tie(c, limiter) = Snapshot(m).counts();
    }
    return checked(Py_BuildValue(
        "(KKKKKKKKIddKKLL)N", c.head, c.inserted, c.sampled, c.updated, c.stale_updates, c.unready_updates, c.draws,
        c.evicted_unsampled, c.streams, c.max_raw, c.priority_change, c.inserted_before, c.sampled_before,
        static_cast<long long>(c.grid.top), static_cast<long long>(c.grid.written), told(limiter)));
  });
}

}  // namespace torchreplay::py::segment
