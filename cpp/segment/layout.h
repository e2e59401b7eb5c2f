// Where everything lies in a segment: a pure function of capacity, fields and view, so that every process computes the
// same.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "segment/element.h"
#include "segment/view.h"
#include "system/pages.h"
#include "tree/priority_tree.h"

namespace torchreplay {

inline constexpr uint64_t kLine = 64;
inline constexpr uint64_t kFormatVersion = 19;
inline constexpr int kMaxParticipants = 4096;  // writers, learners and supervisors at one time; ids fit 15 bits
inline constexpr uint64_t kMaxCapacity = uint64_t{1} << 31;

// A field of about 1 KB or more gets its own array. Beyond that size one more cache miss a row no longer matters, and
// small fields stay together in one or two lines.
inline constexpr uint64_t kOwnArrayBytes = 1024;

constexpr uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

// FNV-1a: finds accidents, not malice.
class Hash {
 public:
  Hash& mix(const void* data, size_t n) {
    for (auto* byte = static_cast<const unsigned char*>(data); n > 0; n--) value_ = (value_ ^ *byte++) * 0x100000001b3;
    return *this;
  }
  Hash& mix(uint64_t v) { return mix(&v, sizeof v); }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325;
};

struct Field {
  Element element;
  uint64_t nbytes;      // of one row's value
  uint64_t offset = 0;  // of slot 0's value from the start of the segment
  uint64_t stride = 0;  // between slots
  bool own_array = false;
};

inline bool holds_version(const Field& f) { return f.element == Element::kI64 && f.nbytes == sizeof(int64_t); }

// A field whose values have any length. Its values lie in pages.
struct RaggedField {
  Element element;
  uint64_t nbytes;  // of one element of a value: one row of its first dimension
  uint32_t group;   // fields of one group have values of the same length in each row
};

inline constexpr uint64_t kMinPage = 64, kMaxPage = 4096;

// The ring of pages: values of any length lie in runs of consecutive pages. All 0 where no field is ragged.
struct Pages {
  uint64_t given = 0;             // bytes that were asked for: less than a page more than all pages have
  uint64_t count = 0, bytes = 0;  // pages, and bytes of each: a power of two
  // Offsets of the regions: a word for each page; the pages; of each slot's absorbed row, its first page; of each page,
  // the slot of the row that begins there; the run that each participant is at.
  uint64_t words = 0, values = 0, runs = 0, owners = 0, in_flight = 0;
  // Hidden fields are the last ones of the layout: the run, then a length for each group.
  uint32_t run_field = 0, groups = 0;

  // Half a page of each row is waste, and so is a word for each page: pages of a sixteenth of the mean row.
  void cut(uint64_t ragged_bytes, uint64_t capacity) {
    given = ragged_bytes;
    bytes = std::clamp(std::bit_floor(ragged_bytes / capacity / 16), kMinPage, kMaxPage);
    count = ragged_bytes / bytes;
  }

  bool are_there() const { return count > 0; }
  uint64_t first_length() const { return run_field + uint64_t{1}; }
  // Most bytes of one value. Those of a row together may be so many, too, each value at a multiple of 8.
  uint64_t most_of_value() const { return given / 4; }
  uint64_t most_of_row() const { return round_up(most_of_value(), 8); }
  // Most pages of one row.
  uint64_t most() const { return round_up(most_of_row(), bytes) / bytes; }
};

struct Layout {
  uint64_t capacity = 0;
  View view;
  std::vector<Field> fields;  // and the hidden ones behind them
  std::vector<RaggedField> ragged;
  Pages pages;
  uint64_t record_stride = 0;
  // Offsets of the regions from the start of the segment.
  uint64_t participants = 0, config = 0, records = 0, at = 0, links = 0, drawn = 0, pending = 0, pending_summary = 0,
           tree = 0, rewrite = 0, holders = 0, claims = 0, arrivals = 0, kept = 0, versions = 0, version_bounds = 0;
  uint64_t config_bytes = 0, bytes = 0;

  // Those whose values have one size, without the hidden ones.
  size_t fixed_fields() const { return pages.are_there() ? pages.run_field : fields.size(); }

  // Of everything that two processes must agree on.
  uint64_t hash() const {
    Hash h;
    for (uint64_t v : {kFormatVersion,
                       capacity,
                       record_stride,
                       records,
                       at,
                       links,
                       drawn,
                       pending,
                       tree,
                       bytes,
                       uint64_t{view.span},
                       uint64_t{view.min_steps},
                       uint64_t{view.stride},
                       uint64_t{view.history},
                       uint64_t{view.across},
                       uint64_t{view.priority_steps},
                       rewrite,
                       holders,
                       claims,
                       arrivals,
                       kept,
                       uint64_t{view.version1},
                       versions,
                       version_bounds})
      h.mix(v);
    for (const Field& f : fields) h.mix(static_cast<uint64_t>(f.element)).mix(f.nbytes).mix(f.offset).mix(f.stride);
    if (!pages.are_there()) return h.value();
    for (uint64_t v : {pages.count, pages.bytes, pages.words, pages.values, pages.runs, pages.owners, pages.in_flight})
      h.mix(v);
    for (const RaggedField& f : ragged) h.mix(static_cast<uint64_t>(f.element)).mix(f.nbytes).mix(f.group);
    return h.value();
  }
};

inline constexpr uint64_t kMinPages = 16;
inline constexpr uint64_t kMaxLength = (uint64_t{1} << 31) - 1;  // of a value
inline constexpr uint64_t kMaxRaggedBytes = uint64_t{1} << 46;   // of all pages
inline constexpr uint64_t kMaxElementBytes = uint64_t{1} << 46;  // of an element of a value
inline constexpr uint64_t kRunInFlightBytes = 16;

// Where the values of a row begin in its run, one after the other, each at a multiple of 8. `lengths`: of each group.
// Returns the bytes of all; kNoSize where 64 bits do not hold them. `offsets` may be null.
inline constexpr uint64_t kNoSize = ~uint64_t{0};
inline uint64_t place_values(const std::vector<RaggedField>& fields, const uint32_t* lengths, uint64_t* offsets) {
  uint64_t end = 0;
  bool fits = true;
  for (size_t f = 0; f < fields.size(); f++) {
    uint64_t bytes;
    fits &= !__builtin_mul_overflow(lengths[fields[f].group], fields[f].nbytes, &bytes);
    fits &= !__builtin_add_overflow(bytes, uint64_t{7}, &bytes);
    if (offsets) offsets[f] = end;
    fits &= !__builtin_add_overflow(end, bytes / 8 * 8, &end);
  }
  return fits ? end : kNoSize;
}

inline constexpr uint64_t kLinkedHeaderBytes = 24, kSingleHeaderBytes = 12;  // of a row
inline constexpr uint64_t kSegmentHeaderBytes = kPage;
inline constexpr uint64_t kParticipantBytes = kLine;
inline constexpr uint64_t kHolderBytes = 24;
inline constexpr uint64_t kVersionBlock = 512;  // slots of which one bound of their versions is kept

// The smallest distance between values of `bytes` bytes, at multiples of 8, that lets none of them touch more lines
// than it has to. Small rows are many: 72 bytes instead of 128 hold twice as many in caches and translation buffers.
constexpr uint64_t tight_stride(uint64_t bytes) {
  const uint64_t lines = round_up(bytes, kLine) / kLine;
  for (uint64_t align = 8; align < kLine; align *= 2) {
    const uint64_t stride = round_up(bytes, align);
    if (round_up(kLine - align + stride, kLine) / kLine <= lines) return stride;
  }
  return lines * kLine;
}

// What is written down of a row before it is changed where it lies: its key + 1, flags that it gets, a byte for each
// field that says whether it changes, and values of all fields, each at a multiple of 8.
struct RewriteRecord {
  uint64_t key1;  // 0: nothing is under way
  uint64_t flags;
};
inline uint64_t rewrite_record_bytes(const std::vector<Field>& fields) {
  uint64_t bytes = sizeof(RewriteRecord) + round_up(fields.size(), sizeof(uint64_t));
  for (const Field& f : fields) bytes += round_up(f.nbytes, sizeof(uint64_t));
  return bytes;
}

// Decides on the pages, and adds the hidden fields. Throws std::invalid_argument.
inline void add_pages(Layout& l, std::vector<RaggedField> ragged, uint64_t ragged_bytes) {
  l.pages.cut(ragged_bytes, l.capacity);
  if (l.pages.count < kMinPages || ragged_bytes > kMaxRaggedBytes)
    throw std::invalid_argument("ragged_bytes " + std::to_string(ragged_bytes) + " is out of range: expected " +
                                std::to_string(kMinPages * kMinPage) + " to " + std::to_string(kMaxRaggedBytes));
  for (const RaggedField& f : ragged) {
    if (f.group > l.pages.groups || f.nbytes > kMaxElementBytes)
      throw std::invalid_argument("a ragged field has a length that no field before has, or needs more than 64 TiB");
    l.pages.groups = std::max(l.pages.groups, f.group + 1);
  }
  l.ragged = std::move(ragged);
  l.pages.run_field = static_cast<uint32_t>(l.fields.size());
  l.fields.push_back({Element::kU64, sizeof(uint64_t)});
  l.fields.insert(l.fields.end(), l.pages.groups, {Element::kU32, sizeof(uint32_t)});
}

// Lays out a segment. `ragged`: fields whose values have any length, of which pages of so many bytes hold the values;
// fields of one group follow the first one of theirs. Throws std::invalid_argument for a capacity out of range or a
// size that overflows.
inline Layout make_layout(uint64_t capacity, std::vector<Field> fields, const View& view, uint64_t config_bytes,
                          std::vector<RaggedField> ragged = {}, uint64_t ragged_bytes = 0) {
  if (capacity < 1 || capacity > kMaxCapacity)
    throw std::invalid_argument("capacity " + std::to_string(capacity) + " is out of range: expected 1 to " +
                                std::to_string(kMaxCapacity));
  Layout l;
  l.capacity = capacity;
  l.view = view;
  l.fields = std::move(fields);
  if (view.version1 > l.fields.size() || (view.version1 && !holds_version(l.fields[view.version1 - 1])))
    throw std::invalid_argument("the field of policy versions is no int64 scalar");
  if (!ragged.empty()) add_pages(l, std::move(ragged), ragged_bytes);
  uint64_t end = view.linked() ? kLinkedHeaderBytes : kSingleHeaderBytes;
  // Widest elements first: every value is then aligned to its own size without padding between fields.
  for (int size : {8, 4, 2, 1}) {
    for (Field& f : l.fields) {
      f.own_array = f.nbytes >= kOwnArrayBytes;
      if (f.own_array || item_size(f.element) != size) continue;
      f.offset = round_up(end, static_cast<uint64_t>(size));
      end = f.offset + f.nbytes;
    }
  }
  l.record_stride = tight_stride(end);
  uint64_t at = kSegmentHeaderBytes;
  auto region = [&at](uint64_t bytes, uint64_t align = kPage) {
    const uint64_t start = round_up(at, align);
    if (bytes > (uint64_t{1} << 46)) throw std::invalid_argument("the fields and capacity given need more than 64 TiB");
    at = start + bytes;
    return start;
  };
  l.participants = region(kMaxParticipants * kParticipantBytes);
  l.config_bytes = config_bytes;
  l.config = region(config_bytes);
  l.records = region(capacity * l.record_stride);
  for (Field& f : l.fields) {
    if (f.own_array) {
      if (f.nbytes > (uint64_t{1} << 46) / capacity)  // before rounding up, which could overflow
        throw std::invalid_argument("the fields and capacity given need more than 64 TiB");
      f.stride = tight_stride(f.nbytes);
      f.offset = region(capacity * f.stride);
    } else {
      f.stride = l.record_stride;
      f.offset += l.records;
    }
  }
  l.at = region(capacity * 8);
  l.links = region(view.linked() ? capacity * sizeof(uint64_t) : 0, kLine);
  const uint64_t words = (capacity + 63) / 64;
  l.drawn = region(words * 8, kLine);
  l.pending = region(words * 8, kLine);
  l.pending_summary = region((words + 63) / 64 * 8, kLine);
  l.tree = region(PriorityTree::bytes(static_cast<int64_t>(capacity), PriorityTree::Largest::kKept));
  l.rewrite = region(rewrite_record_bytes(l.fields));
  const uint64_t claimed = view.claimed ? capacity : 0;
  l.holders = region(view.claimed ? kMaxParticipants * kHolderBytes : 0, kLine);
  l.claims = region(claimed * sizeof(uint64_t), kLine);
  l.arrivals = region(claimed * sizeof(uint32_t), kLine);
  l.kept = region(claimed * sizeof(uint64_t), kLine);
  const uint64_t versioned = view.version1 ? capacity : 0;
  l.versions = region(versioned * sizeof(int64_t), kLine);
  l.version_bounds = region((versioned + kVersionBlock - 1) / kVersionBlock * sizeof(int64_t), kLine);
  if (l.pages.are_there()) {
    const uint64_t bytes = l.pages.count * l.pages.bytes;
    l.pages.words = region(l.pages.count * sizeof(uint64_t));
    l.pages.runs = region(capacity * sizeof(uint64_t), kLine);
    l.pages.owners = region(l.pages.count * sizeof(uint32_t), kLine);
    l.pages.in_flight = region(kMaxParticipants * kRunInFlightBytes, kLine);
    // Up to a huge page is lost before it: worth it where that is little beside the values.
    l.pages.values = region(bytes, bytes >= 16 * kHugePage ? kHugePage : kPage);
  }
  l.bytes = round_up(at, kPage);
  return l;
}

}  // namespace torchreplay
