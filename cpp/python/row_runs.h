// Runs of rows, out of the segment in which a remote writer collects them.
#pragma once

#include "python/attached_segment.h"
#include "write/relayed_rows.h"

namespace torchreplay::py::segment {

// admit(ticket, cut, bytes) -> head: lets the one writer go on up to that ticket, and no further; returns the next one
// to be taken. Rows from key `cut` on, and those to come, have values of at most so many bytes together.
inline PyObject* admit(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    unsigned long long ticket, cut = 0, bytes = 0;
    if (!PyArg_ParseTuple(args, "K|KK", &ticket, &cut, &bytes)) throw PythonError{};
    SegmentMemory& m = segment.memory();
    return admit_up_to(m, ticket, cut, m.has_pages() ? pages_of(m.layout(), bytes) : 0);
  });
}

// run_length(first, end) -> int: how many rows from key `first` on are there, without a gap.
inline PyObject* run_length(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    unsigned long long first, end;
    if (!PyArg_ParseTuple(args, "KK", &first, &end)) throw PythonError{};
    return torchreplay::run_length(segment.memory(), first, end);
  });
}

// measure_run(first, end, most) -> (rows, bytes): what run_length() gives, but no rows behind the one with which values
// of any length have `most` bytes; and the bytes of these values.
inline PyObject* measure_run(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    unsigned long long first, end, most;
    if (!PyArg_ParseTuple(args, "KKK", &first, &end, &most)) throw PythonError{};
    const RunSize size = torchreplay::measure_run(segment.memory(), first, end, most);
    return checked(
        Py_BuildValue("KK", static_cast<unsigned long long>(size.rows), static_cast<unsigned long long>(size.bytes)));
  });
}

// was_written(key, run1) -> bool: whether the row is there that was announced so, or would be gone by now.
inline PyObject* was_written(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    unsigned long long key, run1;
    if (!PyArg_ParseTuple(args, "KK", &key, &run1)) throw PythonError{};
    return torchreplay::was_written(segment.memory(), key, run1);
  });
}

// copy_run(first, n) -> (uint8 tensor, offset): the n rows from key `first` on, which run_length() found, in one block,
// and where their links begin.
inline PyObject* copy_run(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    SegmentMemory& m = segment.memory();
    unsigned long long first, n;
    if (!PyArg_ParseTuple(args, "KK", &first, &n)) throw PythonError{};
    if (n > m.capacity()) throw std::invalid_argument("more rows than there are");
    const BlockLayout at(m.layout(), n, torchreplay::measure_run(m, first, first + n).bytes);
    BlockOwner owner(Block::make(at.bytes, 1));
    char* data = owner.block->data();
    {
      const Unlocked others;
      torchreplay::copy_run(m, first, n, at, data);
    }
    const auto bytes = static_cast<int64_t>(at.bytes);
    Ref block(make_tensor(data, Element::kU8, 1, &bytes, nullptr, std::move(owner)));
    return checked(Py_BuildValue("OK", block.get(), static_cast<unsigned long long>(at.link)));
  });
}

}  // namespace torchreplay::py::segment
