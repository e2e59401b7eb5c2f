// Rows out of a segment, as tensors: for checkpoints.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <tuple>

#include "checkpoint/snapshot.h"
#include "python/attached_segment.h"
#include "python/properties.h"

namespace torchreplay::py::segment {

// Beside the fields: key, leaf, link, step, priority.
inline constexpr Element kRowElements[] = {Element::kI64, Element::kF32, Element::kI64, Element::kI32, Element::kF32};
inline constexpr size_t kRowColumns = 5;
// Their places, from at(0) to at(4).
template <class At>
void place_row_columns(RowColumns& rows, const At& at) {
  rows.key = reinterpret_cast<int64_t*>(at(0));
  rows.leaf = reinterpret_cast<float*>(at(1));
  rows.link = reinterpret_cast<int64_t*>(at(2));
  rows.step = reinterpret_cast<int32_t*>(at(3));
  rows.priority = reinterpret_cast<float*>(at(4));
}

// export_rows(from, to) -> [*fields, key, leaf, link, step, priority]: tensors of the n rows in those slots.
// BufferError while it is being restored.
inline PyObject* export_rows(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    SegmentMemory& m = segment.memory();
    segment.require_fixed();
    segment.settle();
    unsigned long long from, to;
    if (!PyArg_ParseTuple(args, "KK", &from, &to)) throw PythonError{};
    if (from >= to || to > m.capacity()) throw std::invalid_argument("bad range of slots");
    const std::vector<FieldSpec>& specs = segment.fields.specs;
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
    place_row_columns(rows, [&](size_t c) { return data + offset[specs.size() + c]; });
    int64_t n;
    {
      const Unlocked others;
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

// Memory that a caller lends for a call.
struct Lent {
  Py_buffer view{};
  Lent() = default;
  Lent(const Lent&) = delete;
  ~Lent() { PyBuffer_Release(&view); }
};

// Places for `n` rows in `room`, column after column, those of the widest elements first, so that all are aligned.
class PackedColumns {
 public:
  // Throws std::invalid_argument for a room that is too small.
  PackedColumns(const std::vector<FieldSpec>& specs, uint64_t n, bool values, const Py_buffer& room) : places_(n) {
    const auto width = [](Element e) { return static_cast<size_t>(item_size(e)); };
    if (values)
      for (const FieldSpec& f : specs) columns_.push_back({width(f.element), f.nbytes});
    for (const Element e : kRowElements) columns_.push_back({width(e), width(e)});
    for (Column& column : columns_) order_.push_back(&column);
    std::ranges::stable_sort(order_, std::greater{}, &Column::width);
    auto* at = static_cast<char*>(room.buf);
    uint64_t left = static_cast<uint64_t>(room.len);
    for (Column* column : order_) {
      column->data = at;
      if (reinterpret_cast<uintptr_t>(at) % column->width || column->bytes > left / n)
        throw std::invalid_argument("the room for rows is too small, or not aligned");
      at += column->bytes * n;
      left -= column->bytes * n;
    }
    rows_.values.resize(specs.size());
    for (size_t f = 0; values && f < specs.size(); f++) rows_.values[f] = columns_[f].data;
    const Column* beside = &columns_[columns_.size() - kRowColumns];
    place_row_columns(rows_, [&](size_t c) { return beside[c].data; });
  }

  const RowColumns& rows() const { return rows_; }

  // Of as many rows as were expected there are only `n`.
  void close_gaps(uint64_t n) const {
    char* at = order_.front()->data;
    for (const Column* column : order_) {
      if (n < places_) std::memmove(at, column->data, column->bytes * n);
      at += column->bytes * n;
    }
  }

 private:
  struct Column {
    size_t width, bytes;  // of an element; of a row
    char* data = nullptr;
  };

  uint64_t places_;
  std::vector<Column> columns_;  // in the order of export_rows()
  std::vector<Column*> order_;   // as they lie
  RowColumns rows_;
};

// pack_rows(from, to, room, values) -> n: copies the n rows in those slots to `room`, as PackedColumns places them,
// without gaps. Without `values` only what rows have beside their fields. BufferError while it is being restored.
inline PyObject* pack_rows(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    SegmentMemory& m = segment.memory();
    segment.require_fixed();
    segment.settle();
    unsigned long long from, to;
    Lent room;
    int values;
    if (!PyArg_ParseTuple(args, "KKw*p", &from, &to, &room.view, &values)) throw PythonError{};
    if (from >= to || to > m.capacity()) throw std::invalid_argument("bad range of slots");
    const PackedColumns columns(segment.fields.specs, to - from, values, room.view);
    uint64_t n;
    {
      const Unlocked others;
      n = Snapshot(m).copy_out(from, to, columns.rows());
      columns.close_gaps(n);
    }
    return checked(PyLong_FromUnsignedLongLong(n));
  });
}

// counts() -> ((head, inserted, sampled, updated, stale_updates, unready_updates, draws, evicted_unsampled, streams,
// max_raw, priority_change, inserted_before, sampled_before, grid, written, cleared), limiter), both of one moment.
// BufferError while it is being restored.
inline PyObject* counts(PyObject* self, PyObject*) {
  return on_segment(self, [&](AttachedSegment& segment) {
    SegmentMemory& m = segment.memory();
    segment.settle();
    Counts c;
    LimiterConfig limiter;
    {
      const Unlocked others;
      std::tie(c, limiter) = Snapshot(m).counts();
    }
    return checked(Py_BuildValue("(KKKKKKKKIddKKLLK)N", c.head, c.inserted, c.sampled, c.updated, c.stale_updates,
                                 c.unready_updates, c.draws, c.evicted_unsampled, c.streams, c.max_raw,
                                 c.priority_change, c.inserted_before, c.sampled_before,
                                 static_cast<long long>(c.grid.top), static_cast<long long>(c.grid.written),
                                 static_cast<unsigned long long>(c.cleared), told(limiter)));
  });
}

}  // namespace torchreplay::py::segment
