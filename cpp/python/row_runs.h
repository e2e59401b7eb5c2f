// Runs of rows, out of the segment in which a remote writer collects them.
#pragma once

#include "python/attached_segment.h"
#include "write/relayed_rows.h"

namespace torchreplay::py::segment {

// admit(ticket) -> head: lets writers go on up to that ticket, and no further; returns the next one to be taken.
inline PyObject* admit(PyObject* self, PyObject* ticket) {
  return on_segment(self, [&](AttachedSegment& segment) { return admit_up_to(segment.memory(), as_uint(ticket)); });
}

// run_length(first, end) -> int: how many rows from key `first` on are there, without a gap.
inline PyObject* run_length(PyObject* self, PyObject* args) {
  return on_segment(self, [&](AttachedSegment& segment) {
    unsigned long long first, end;
    if (!PyArg_ParseTuple(args, "KK", &first, &end)) throw PythonError{};
    return torchreplay::run_length(segment.memory(), first, end);
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
    const BlockLayout at(m.layout(), n);
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
