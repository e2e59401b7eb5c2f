// Tells Python where everything lies in a segment: to plan memory, and to look into files without opening them.
#pragma once

#include "python/segment_object.h"
#include "system/simd.h"

namespace torchreplay::py {

inline unsigned long long as_ull(uint64_t n) { return n; }

// {name: (first byte, bytes)} of the regions, `fields`: [(first byte, bytes between slots)], and a few sizes. Of a
// segment with ragged fields: "page_words" to "pages" is what is kept of them, "pages" to "bytes" their values; else 0.
inline PyObject* regions_of(const Layout& l) {
  const Ref fields(checked(PyList_New(0)));
  uint64_t end_of_rows = l.records + l.capacity * l.record_stride;
  for (const Field& f : l.fields) {
    const Ref field(checked(Py_BuildValue("KK", as_ull(f.offset), as_ull(f.stride))));
    if (PyList_Append(fields.get(), field.get()) < 0) throw PythonError{};
    if (f.own_array) end_of_rows = std::max(end_of_rows, f.offset + l.capacity * f.stride);
  }
  const uint64_t leaves = l.tree + PriorityTree::kLeavesOffset;
  return checked(Py_BuildValue("{s:O,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "fields", fields.get(),
                               "records", as_ull(l.records), "record_stride", as_ull(l.record_stride), "row_header",
                               as_ull(l.view.linked() ? kLinkedHeaderBytes : kSingleHeaderBytes), "end_of_rows",
                               as_ull(end_of_rows), "at", as_ull(l.at), "links", as_ull(l.links), "tree",
                               as_ull(l.tree), "leaves", as_ull(leaves), "page_words", as_ull(l.pages.words), "pages",
                               as_ull(l.pages.values), "page_bytes", as_ull(l.pages.bytes), "page_count",
                               as_ull(l.pages.count), "ragged_bytes", as_ull(l.pages.given), "bytes", as_ull(l.bytes)));
}

// segment_regions(capacity, fields, view, text_bytes) -> dict: of the segment that Segment(create=True) would make.
inline PyObject* segment_regions(PyObject*, PyObject* args) {
  return guarded([&] {
    unsigned long long capacity, text;
    PyObject *list, *view;
    if (!PyArg_ParseTuple(args, "KOOK", &capacity, &list, &view, &text)) throw PythonError{};
    const Fields fields = Fields::parse(list);
    return regions_of(segment::Shape::parse(view).layout_of(capacity, fields, text));
  });
}

// simd() -> str: the instructions that the tree runs on here.
inline PyObject* simd(PyObject*, PyObject*) {
  return guarded([] { return checked(PyUnicode_FromString(best_simd() == Simd::kAvx512 ? "AVX-512" : "portable")); });
}

}  // namespace torchreplay::py
