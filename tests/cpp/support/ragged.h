// Rows of any length whose values follow from a number, so that a row that is read tells whether it is whole.
#pragma once

#include <optional>
#include <random>
#include <string>
#include <vector>

#include "segment/run.h"
#include "segments.h"

namespace torchreplay::testing {

// Tokens with a number for each, and bytes. The fixed field holds the row's number.
inline Plan ragged_plan(uint64_t capacity, uint64_t ragged_bytes) {
  Plan plan;
  plan.capacity = capacity;
  plan.ragged = {{Element::kI32, 4, 0}, {Element::kU16, 2, 0}, {Element::kU8, 1, 1}};
  plan.ragged_bytes = ragged_bytes;
  return plan;
}

inline uint64_t mixed(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// The values of a row: lengths of its two groups, at most `most` each, and often 0.
struct RaggedValues {
  uint64_t number;
  uint32_t lengths[2];

  RaggedValues(uint64_t number, uint32_t most) : number(number) {
    for (uint64_t g = 0; g < 2; g++) {
      const uint64_t word = mixed(number * 2 + g + 1);
      lengths[g] = word % 4 ? static_cast<uint32_t>((word >> 8) % (most + 1)) : 0;
    }
  }

  std::vector<char> of(const RaggedField& field, size_t index) const {
    std::vector<char> bytes(lengths[field.group] * field.nbytes);
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<char>(mixed(number ^ i << 32 ^ index << 24));
    return bytes;
  }
};

// Rows number first, first + 1, ... for RingWriter::append.
struct RaggedFill {
  SegmentMemory& m;
  uint64_t first;
  uint32_t most;
  std::vector<RaggedValues> rows = {};
  uint64_t runs = 0;  // that were copied

  RaggedFill(SegmentMemory& m, uint64_t first, uint64_t n, uint32_t most) : m(m), first(first), most(most) {
    for (uint64_t i = 0; i < n; i++) rows.emplace_back(first + i, most);
  }

  void operator()(uint64_t row, uint64_t slot) const {
    copy_payload(m.value(m.layout().fields[0], slot), &rows[row].number, sizeof(uint64_t));
  }
  const uint32_t* lengths(uint64_t row) const { return rows[row].lengths; }
  void run(uint64_t row, char* to) {
    runs++;
    uint64_t offsets[3];
    place_values(m.layout().ragged, rows[row].lengths, offsets);
    for (size_t f = 0; f < 3; f++) {
      const std::vector<char> bytes = rows[row].of(m.layout().ragged[f], f);
      if (!bytes.empty()) copy_payload(to + offsets[f], bytes.data(), bytes.size());
    }
  }
};

struct Appended {
  Append outcome;
  std::vector<int64_t> keys;
  uint64_t runs;
};

inline Appended append_ragged(SegmentMemory& m, int id, uint64_t n, uint64_t first, uint32_t most) {
  const std::vector<RowMeta> meta(n);
  std::vector<int64_t> keys(n);
  uint64_t written = 0;
  RaggedFill fill(m, first, n, most);
  const Append outcome = RingWriter(m, id).append(n, meta.data(), keys.data(), written, fill);
  keys.resize(written);
  return {outcome, keys, fill.runs};
}

// Writes a row with values of so many bytes, and returns its slot.
inline uint64_t append_bytes(SegmentMemory& m, int id, uint32_t bytes, const RowMeta& meta = {}) {
  struct Fill {
    uint32_t given[2];
    void operator()(uint64_t, uint64_t) const {}
    const uint32_t* lengths(uint64_t) const { return given; }
  } fill{{0, bytes}};
  int64_t key = -1;
  uint64_t written = 0;
  if (RingWriter(m, id).append(1, &meta, &key, written, fill) != Append::kDone)
    throw std::runtime_error("the row was not written");
  return m.slot_of(static_cast<uint64_t>(key));
}

// A writer of pages that may lag or die between any two steps: said, tickets, busy, copied, done. Its row is that of a
// SteppedWriter. Steps are those of the protocol, written down a second time.
class SteppedRun {
 public:
  SteppedRun(SegmentMemory& m, int id, uint64_t number, uint32_t most)
      : memory_(m), id_(static_cast<uint64_t>(id)), values_(number, most) {
    bytes_ = place_values(m.layout().ragged, values_.lengths, offsets_);
    n_ = (bytes_ + m.layout().pages.bytes - 1) / m.layout().pages.bytes;
  }

  const RaggedValues& values() const { return values_; }
  const Run& run() const { return run_; }

  // A step further. True: the run is filled, and its row may be written.
  bool advance() {
    if (n_ == 0) return true;
    switch (state_) {
      case kSay:
        say();
        break;
      case kTicket:
        take();
        break;
      case kSeize:
        seize();
        break;
      case kVoid:
        release();
        break;
      case kCopy:
        copy();
        break;
      case kDone:
        word(at_).store(slot_word::done(run_.first + at_, id_));
        if (++at_ == n_) state_ = kFilled;
        break;
      case kFilled:
        return true;
    }
    return state_ == kFilled;
  }

  // Into the record of its row.
  void describe(uint64_t slot) const {
    *memory_.run1_of_row(slot) = n_ ? run_.first + 1 : 0;
    for (size_t g = 0; g < 2; g++) *memory_.length_of_row(slot, g) = values_.lengths[g];
    std::memcpy(memory_.value(memory_.layout().fields[0], slot), &values_.number, sizeof(uint64_t));
  }
  void forget() const { memory_.run_in_flight(static_cast<int>(id_)).first1 = 0; }

 private:
  enum State { kSay, kTicket, kSeize, kVoid, kCopy, kDone, kFilled };

  std::atomic<uint64_t>& word(uint64_t i) const {
    return memory_.page_word((run_.first + i) % memory_.layout().pages.count);
  }

  void say() {
    const uint64_t count = memory_.layout().pages.count;
    head_ = memory_.header().page_head.load();
    run_ = {head_ % count + n_ > count ? (head_ / count + 1) * count : head_, n_};
    RunInFlight& line = memory_.run_in_flight(static_cast<int>(id_));
    line.pages = n_;
    line.first1 = run_.first + 1;
    state_ = kTicket;
  }
  void take() {
    state_ = memory_.header().page_head.compare_exchange_strong(head_, run_.first + n_) ? kSeize : kSay;
    at_ = 0;
  }
  void seize() {
    const uint64_t now = word(at_).load();
    if (now % 2 || now >> 16 > run_.first + at_) {
      state_ = at_ ? kVoid : kSay;
      return;
    }
    word(at_).store(slot_word::busy(run_.first + at_, id_));
    if (++at_ < n_) return;
    state_ = kCopy;
    at_ = 0;
  }
  void release() {
    at_--;
    word(at_).store(slot_word::voided(run_.first + at_));
    if (at_ == 0) state_ = kSay;
  }
  void copy() {
    char* to = memory_.page(run_.first % memory_.layout().pages.count);
    const std::vector<char> bytes = values_.of(memory_.layout().ragged[at_], at_);
    if (!bytes.empty()) std::memcpy(to + offsets_[at_], bytes.data(), bytes.size());
    if (++at_ < 3) return;
    state_ = kDone;
    at_ = 0;
  }

  SegmentMemory& memory_;
  uint64_t id_;
  RaggedValues values_;
  uint64_t offsets_[3], bytes_, n_, head_ = 0, at_ = 0;
  Run run_;
  State state_ = kSay;
};

enum class Found {
  kGone,   // no row, or one that changed meanwhile
  kNoRun,  // a row that says of its values what no writer says
  kLost,   // a row whose pages are others'
  kTorn,   // the values are none that a row has
  kWhole,
};

// What a reader without a lock finds in a slot; `number`: of the row.
inline Found look_at(SegmentMemory& m, uint64_t slot, uint32_t most, uint64_t& number, uint64_t* key = nullptr) {
  const uint64_t word = m.row(slot).word.load(std::memory_order_acquire);
  if (!slot_word::is_row(word)) return Found::kGone;
  Run run;
  uint32_t lengths[2];
  const bool sound = read_run(m, slot, run, lengths);
  copy_payload(&number, m.value(m.layout().fields[0], slot), sizeof number);
  if (load_after_copy(m.row(slot).word) != word) return Found::kGone;
  if (!sound) return Found::kNoRun;
  std::vector<char> bytes(run.pages * m.layout().pages.bytes);
  if (run.pages) copy_payload(bytes.data(), m.page(m.page_of(run.first)), bytes.size());
  const bool intact = is_intact(m, run);
  if (load_after_copy(m.row(slot).word) != word) return Found::kGone;
  if (!intact) return Found::kLost;
  if (key) *key = slot_word::key1(word) - 1;
  const RaggedValues values(number, most);
  if (lengths[0] != values.lengths[0] || lengths[1] != values.lengths[1]) return Found::kTorn;
  uint64_t offsets[3];
  place_values(m.layout().ragged, lengths, offsets);
  for (size_t f = 0; f < 3; f++) {
    const std::vector<char> expected = values.of(m.layout().ragged[f], f);
    if (!std::equal(expected.begin(), expected.end(), bytes.begin() + static_cast<ptrdiff_t>(offsets[f])))
      return Found::kTorn;
  }
  return Found::kWhole;
}

// Whether the first page of a row's run was issued again.
inline bool has_lost_its_first_page(const SegmentMemory& m, const Run& run) {
  return run.pages && run.first + m.layout().pages.count < m.header().page_head.load();
}

inline uint64_t busy_pages(const SegmentMemory& m) {
  uint64_t n = 0;
  for (uint64_t p = 0; p < m.layout().pages.count; p++) n += slot_word::is_busy(m.page_word(p).load());
  return n;
}

}  // namespace torchreplay::testing
