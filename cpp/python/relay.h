// Rows from the segment in which a remote writer collects them, written into the buffer's own.
#pragma once

#include "python/writer_object.h"
#include "write/relayed_rows.h"

namespace torchreplay::py::writer {

// One dimension of `n` elements without gaps. The view keeps the memory.
inline char* open_column(ArrayView& view, PyObject* o, Element element, int64_t n, const char* what) {
  const bool opened = view.open(o);
  const StridedArray& a = view.array;
  if (!opened || a.dims != 1 || a.element != element || a.shape[0] != n || !is_dense(a, 0))
    throw std::invalid_argument(std::string(what) + " of the relayed rows is of another type or length");
  return const_cast<char*>(a.data);
}

// _relay(block, n, before, keys, start): writes rows `start` to n of a block that copy_run() gave, and keeps their
// keys.
inline PyObject* relay(PyObject* self, PyObject* args) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    const WriterUse use(self, s);
    PyObject *block, *before, *keys;
    unsigned long long n, start;
    if (!PyArg_ParseTuple(args, "OKOOK", &block, &n, &before, &keys, &start)) throw PythonError{};
    SegmentMemory& m = s.attached->memory();
    const auto& columns = m.layout().fields;
    if (n > kMaxKeys || start > n) throw std::invalid_argument("bad number of relayed rows");
    const BlockLayout at(m.layout(), n);
    const auto rows = static_cast<int64_t>(n);
    ArrayView block_view, before_view, keys_view;
    const char* data = open_column(block_view, block, Element::kU8, static_cast<int64_t>(at.bytes), "the block");
    auto* from = reinterpret_cast<int64_t*>(open_column(before_view, before, Element::kI64, rows, "a predecessor"));
    auto* to = reinterpret_cast<int64_t*>(open_column(keys_view, keys, Element::kI64, rows, "a key"));
    RelayedRows relayed(m, at, data, n, from, to, start);
    auto fill = [&](uint64_t row, uint64_t slot) {
      for (size_t f = 0; f < columns.size(); f++)
        m.write(columns[f], slot, data + at.values[f] + (start + row) * columns[f].nbytes);
    };
    PythonWait wait(self);
    if (start < n) s.session.write(n - start, relayed, to + start, fill, wait);
  });
}

}  // namespace torchreplay::py::writer
