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

// _relay(block, n, before, keys, runs, start, end=n): writes rows `start` to `end` of the n of a block that copy_run()
// gave, and keeps their keys, and the pages of the last two.
inline PyObject* relay(PyObject* self, PyObject* args) {
  return method<WriterObject>(self, [&](WriterObject& s) {
    const WriterUse use(self, s);
    PyObject *block, *before, *keys, *runs;
    unsigned long long n, start, end = kMaxKeys;
    if (!PyArg_ParseTuple(args, "OKOOOK|K", &block, &n, &before, &keys, &runs, &start, &end)) throw PythonError{};
    SegmentMemory& m = s.attached->memory();
    end = std::min(n, end);
    if (n > kMaxKeys || start > end) throw std::invalid_argument("bad number of relayed rows");
    const auto rows = static_cast<int64_t>(n);
    ArrayView block_view, before_view, keys_view, runs_view;
    const int64_t bytes = block_view.open(block) && block_view.array.dims == 1 ? block_view.array.shape[0] : 0;
    const char* data = open_column(block_view, block, Element::kU8, bytes, "the block");
    auto* from = reinterpret_cast<int64_t*>(open_column(before_view, before, Element::kI64, rows, "a predecessor"));
    auto* to = reinterpret_cast<int64_t*>(open_column(keys_view, keys, Element::kI64, rows, "a key"));
    auto* pages = reinterpret_cast<int64_t*>(open_column(runs_view, runs, Element::kI64, 2, "a run"));
    RelayedValues values(m, data, static_cast<uint64_t>(bytes), n, start);
    RelayedRows relayed(m, values.at(), data, n, from, to, pages, start);
    PythonWait wait(self);
    if (start < end) s.session.write(end - start, relayed, to + start, values, wait, values.run_bytes());
  });
}

}  // namespace torchreplay::py::writer
