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

// Memory that a caller lends for a call.
struct Lent {
  Py_buffer view{};
  Lent() = default;
  Lent(const Lent&) = delete;
  ~Lent() { PyBuffer_Release(&view); }
};

// Places for `n` rows in memory, column after column, those of the widest elements first, so that all are aligned. The
// columns are those of the fields, the lengths of each group of ragged ones, and what rows have beside them.
class PackedColumns {
 public:
  // `elements`: of each ragged field, in all rows; empty: there are no columns of fields and lengths. Throws
  // std::invalid_argument for too little memory.
  PackedColumns(const AttachedSegment& segment, uint64_t n, const std::vector<uint64_t>* elements, char* at,
                uint64_t left)
      : fields_(segment.fields) {
    const std::vector<FieldSpec>& specs = fields_.specs;
    const uint32_t groups = segment.memory().layout().pages.groups;
    if (elements) {
      for (const FieldSpec& f : specs)
        columns_.push_back({f.element, f.nbytes, f.ragged() ? (*elements)[f.column] : n, &f});
      columns_.insert(columns_.end(), groups, {Element::kU32, item_size(Element::kU32), n, nullptr});
    }
    for (const Element e : kRowElements) columns_.push_back({e, static_cast<uint64_t>(item_size(e)), n, nullptr});
    for (Column& column : columns_) order_.push_back(&column);
    std::ranges::stable_sort(order_, std::greater{}, [](const Column* column) { return item_size(column->element); });
    for (Column* column : order_) {
      column->data = at;
      if (reinterpret_cast<uintptr_t>(at) % static_cast<uint64_t>(item_size(column->element)) ||
          (column->count && column->bytes > left / column->count))
        throw std::invalid_argument("the room for rows is too small, or not aligned");
      at += column->bytes * column->count;
      left -= column->bytes * column->count;
    }
    rows_.values.resize(fields_.fixed.size());
    for (size_t f = 0; elements && f < specs.size(); f++)
      if (!specs[f].ragged()) rows_.values[specs[f].column] = columns_[f].data;
    for (const size_t f : fields_.ragged) rows_.ragged.push_back(elements ? columns_[f].data : nullptr);
    for (uint32_t g = 0; elements && g < groups; g++)
      rows_.lengths.push_back(reinterpret_cast<uint32_t*>(columns_[specs.size() + g].data));
    const Column* beside = &columns_[columns_.size() - kRowColumns];
    place_row_columns(rows_, [&](size_t c) { return beside[c].data; });
  }

  // Bytes of a row, in all columns but those of ragged fields.
  static uint64_t row_bytes(const AttachedSegment& segment) {
    uint64_t bytes = segment.memory().layout().pages.groups * sizeof(uint32_t);
    for (const size_t f : segment.fields.fixed) bytes += segment.fields.specs[f].nbytes;
    for (const Element e : kRowElements) bytes += static_cast<uint64_t>(item_size(e));
    return bytes;
  }

  const RowColumns& rows() const { return rows_; }

  // Of as many rows as were expected there are only `n`, with so many elements of each ragged field.
  void close_gaps(uint64_t n, const std::vector<uint64_t>& elements) {
    keep(n, elements);
    char* at = order_.front()->data;
    for (Column* column : order_) {
      const uint64_t bytes = column->bytes * column->count;
      if (at != column->data && bytes) std::memmove(at, column->data, bytes);
      column->data = at;
      at += bytes;
    }
  }

  // A tensor of each column, of which there are only so many rows and elements. Each keeps `block`, in whose memory
  // they lie.
  PyObject* tensors(uint64_t n, const std::vector<uint64_t>& elements, Block* block) {
    keep(n, elements);
    Ref list(checked(PyList_New(0)));
    for (const Column& column : columns_) {
      int64_t shape[StridedArray::kMaxDims + 1] = {static_cast<int64_t>(column.count)};
      int dims = 1;
      if (column.spec)
        for (const int64_t size : column.spec->shape) shape[dims++] = size;
      const Ref tensor(make_tensor(column.data, column.element, dims, shape, nullptr, BlockOwner(block)));
      if (PyList_Append(list.get(), tensor.get())) throw PythonError{};
    }
    return list.release();
  }

 private:
  struct Column {
    Element element;
    uint64_t bytes, count;
    const FieldSpec* spec;  // nullptr: of no field
    char* data = nullptr;
  };

  void keep(uint64_t n, const std::vector<uint64_t>& elements) {
    for (Column& column : columns_)
      column.count = column.spec && column.spec->ragged() ? elements[column.spec->column] : n;
  }

  const Fields& fields_;
  std::vector<Column> columns_;  // in the order of export_rows()
  std::vector<Column*> order_;   // as they lie
  RowColumns rows_;
};

// The slots from `from` up to `to`, which are not all that there are.
inline void require_slots(const SegmentMemory& m, uint64_t from, uint64_t to) {
  if (from >= to || to > m.capacity()) throw std::invalid_argument("bad range of slots");
}

// export_rows(from, to, most) -> ([*fields, *lengths, key, leaf, link, step, priority], next): tensors of the n rows in
// slots from `from` on, up to `next`: of those before `to` that take at most so many bytes, but always one. Without
// ragged fields there are no lengths, and `next` is `to`. BufferError while it is being restored.
inline PyObject* export_rows(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    SegmentMemory& m = segment.memory();
    segment.settle();
    unsigned long long from, to, most = kMaxRaggedBytes;
    if (!PyArg_ParseTuple(args, "KK|K", &from, &to, &most)) throw PythonError{};
    require_slots(m, from, to);
    const uint64_t row_bytes = PackedColumns::row_bytes(segment);
    Snapshot snapshot(m);
    Snapshot::Measured found{to, to - from, {}, row_bytes * (to - from), 0};
    if (m.has_pages()) {
      const Unlocked others;
      found = snapshot.measure(from, to, row_bytes, most);
      if (found.next == from) found = snapshot.measure(from, from + 1, row_bytes, found.bytes_of_next);
    }
    BlockOwner block(Block::make(found.bytes, static_cast<int>(segment.fields.specs.size() + kRowColumns) +
                                                  static_cast<int>(m.layout().pages.groups) + 1));
    PackedColumns columns(segment, found.rows, &found.elements, block.block->data(), found.bytes);
    uint64_t n;
    {
      const Unlocked others;
      n = m.has_pages() ? snapshot.copy_measured(columns.rows(), found.elements)
                        : snapshot.copy_out(from, to, columns.rows());
    }
    const Ref list(columns.tensors(n, found.elements, block.block));
    return checked(Py_BuildValue("OK", list.get(), static_cast<unsigned long long>(found.next)));
  });
}

// pack_rows(from, to, room, values) -> (next, n, elements, bytes): copies the n rows in slots from `from` up to `next`
// to `room`, as PackedColumns places them, without gaps. `elements`: of each ragged field. With such fields `next` may
// be less than `to`: the row there takes `bytes`, and has no place. Without `values` only what rows have beside their
// fields. BufferError while it is being restored.
inline PyObject* pack_rows(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    SegmentMemory& m = segment.memory();
    segment.settle();
    unsigned long long from, to;
    Lent room;
    int values;
    if (!PyArg_ParseTuple(args, "KKw*p", &from, &to, &room.view, &values)) throw PythonError{};
    require_slots(m, from, to);
    const bool measures = values && m.has_pages();
    Snapshot snapshot(m);
    Snapshot::Measured found{to, to - from, {}, 0, 0};
    uint64_t n = 0;
    {
      const Unlocked others;
      const auto bytes = static_cast<uint64_t>(room.view.len);
      if (measures) found = snapshot.measure(from, to, PackedColumns::row_bytes(segment), bytes);
      PackedColumns columns(segment, found.rows, values ? &found.elements : nullptr, static_cast<char*>(room.view.buf),
                            bytes);
      n = measures ? snapshot.copy_measured(columns.rows(), found.elements)
                   : snapshot.copy_out(from, to, columns.rows());
      columns.close_gaps(n, found.elements);
    }
    const Ref elements(checked(PyList_New(0)));
    for (const uint64_t of_field : found.elements) {
      const Ref number(checked(PyLong_FromUnsignedLongLong(of_field)));
      if (PyList_Append(elements.get(), number.get())) throw PythonError{};
    }
    return checked(Py_BuildValue("KKOK", static_cast<unsigned long long>(found.next),
                                 static_cast<unsigned long long>(n), elements.get(),
                                 static_cast<unsigned long long>(found.bytes_of_next)));
  });
}

// row_values(slot) -> [tensor, ...] | None: the fields of the row in a slot, where they lie: [1, *shape] of each field,
// [length, *shape] of a ragged one. None: there is no row. It may be overwritten at any time: see is_whole().
inline PyObject* row_values(PyObject* self, PyObject* number) {
  return method<SegmentObject>(self, [&](SegmentObject& s) {
    const uint64_t slot = as_uint(number);
    const std::shared_ptr<AttachedSegment> attached = s.attached();
    SegmentMemory& m = attached->memory();
    const Layout& layout = m.layout();
    require_slots(m, slot, slot + 1);
    Run run;
    std::vector<uint32_t> lengths;
    if (!Snapshot(m).find_run(slot, run, lengths)) return Py_NewRef(Py_None);
    std::vector<uint64_t> offsets(layout.ragged.size());
    place_values(layout.ragged, lengths.data(), offsets.data());
    Ref list(checked(PyList_New(0)));
    for (const FieldSpec& spec : attached->fields.specs) {
      int64_t shape[StridedArray::kMaxDims + 1] = {spec.ragged() ? lengths[layout.ragged[spec.column].group] : 1};
      std::ranges::copy(spec.shape, shape + 1);
      char* const at = spec.ragged() ? m.page(m.page_of(run.first)) + offsets[spec.column]
                                     : m.value(layout.fields[spec.column], slot);
      const Ref tensor(
          make_tensor(at, spec.element, 1 + static_cast<int>(spec.shape.size()), shape, nullptr, attached));
      if (PyList_Append(list.get(), tensor.get())) throw PythonError{};
    }
    return list.release();
  });
}

// is_whole(slot, key) -> bool: whether the row with `key` is in a slot still, with all its values of any length.
inline PyObject* is_whole(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    SegmentMemory& m = segment.memory();
    unsigned long long slot, key;
    if (!PyArg_ParseTuple(args, "KK", &slot, &key)) throw PythonError{};
    require_slots(m, slot, slot + 1);
    return checked(PyBool_FromLong(Snapshot(m).is_whole(slot, key)));
  });
}

// counts() -> ((head, inserted, sampled, updated, stale_updates, unready_updates, draws, evicted_unsampled, streams,
// max_raw, priority_change, inserted_before, sampled_before, grid, written, cleared, dropped_items, expired_items,
// evicted_by_pages, redraws, taken_ahead, missed, aged, ages, largest_age), limiter), both of one moment. BufferError
// while it is being restored.
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
    return checked(Py_BuildValue("(KKKKKKKKIddKKLLKKKKKKKKLL)N", c.head, c.inserted, c.sampled, c.updated,
                                 c.stale_updates, c.unready_updates, c.draws, c.evicted_unsampled, c.streams, c.max_raw,
                                 c.priority_change, c.inserted_before, c.sampled_before,
                                 static_cast<long long>(c.grid.top), static_cast<long long>(c.grid.written),
                                 static_cast<unsigned long long>(c.cleared), c.dropped_items, c.expired_items,
                                 c.evicted_by_pages, c.redraws, c.taken_ahead, c.missed, c.aged,
                                 static_cast<long long>(c.ages), static_cast<long long>(c.largest_age), told(limiter)));
  });
}

}  // namespace torchreplay::py::segment
