#include <boost/test/unit_test.hpp>
#include <future>
#include <limits>
#include <set>
#include <thread>

#include "draw/batch_sampler.h"
#include "invariants.h"
#include "segments.h"
#include "write/ring_writer.h"

BOOST_AUTO_TEST_SUITE(test_ring)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kWriter = 1, kOther = 2;

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity) {
  Plan plan;
  plan.capacity = capacity;
  // An own array too, so that a row lies in two places.
  plan.fields = {{Element::kI64, 8}, {Element::kU8, 5}, {Element::kI64, 1600}};
  return make_segment(plan);
}

struct Written {
  Append outcome;
  std::vector<int64_t> keys;
};

// Appends `n` rows of patterns first, first + 1, ...
Written extend(SegmentMemory& m, int id, uint64_t n, uint64_t first = 0) {
  std::vector<RowMeta> meta(n);
  std::vector<int64_t> keys(n);
  uint64_t written = 0;
  const Append outcome = RingWriter(m, id).append(n, meta.data(), keys.data(), written,
                                                  [&](uint64_t row, uint64_t slot) { fill_row(m, slot, first + row); });
  keys.resize(written);
  return {outcome, keys};
}

// The pattern of a row, or nothing when its bytes are not all of one pattern.
std::optional<uint64_t> pattern_of(const char* small, const char* tiny, const char* large) {
  uint64_t pattern, other;
  std::memcpy(&pattern, small, 8);
  if (std::memcmp(tiny, small, 5) != 0) return {};
  for (int i = 0; i < 1600; i += 8) {
    std::memcpy(&other, large + i, 8);
    if (other != pattern) return {};
  }
  return pattern;
}

std::optional<uint64_t> pattern_in(SegmentMemory& m, uint64_t slot) {
  const auto& f = m.layout().fields;
  return pattern_of(m.value(f[0], slot), m.value(f[1], slot), m.value(f[2], slot));
}

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> v;
  for (int64_t i = begin; i < end; i++) v.push_back(i);
  return v;
}

// A batch of rows from ring_of(), checked against what the writers say they wrote.
class Checker {
 public:
  explicit Checker(SegmentMemory& m) : sampler_(m) {}

  // False when nothing could be drawn.
  bool draw(uint64_t step) {
    const BatchPointers out{{bytes(small_), tiny_, bytes(large_)}, keys_, weight_, probability_};
    Shortage shortage;
    if (sampler_.sample(kBatch, 0.4, {7, 0, step}, out, shortage) != Draw::kDone) return false;
    for (int i = 0; i < kBatch; i++) {
      const auto pattern = pattern_of(bytes(small_) + 8 * i, tiny_ + 5 * i, bytes(large_) + 1600 * i);
      torn_ += !pattern;
      if (pattern) seen_.emplace_back(keys_[i], *pattern);
    }
    return true;
  }
  uint64_t torn() const { return torn_; }
  // Key and pattern of every row drawn.
  const std::vector<std::pair<int64_t, uint64_t>>& seen() const { return seen_; }

 private:
  static constexpr int kBatch = 4;
  static char* bytes(int64_t* p) { return reinterpret_cast<char*>(p); }

  BatchSampler sampler_;
  uint64_t torn_ = 0;
  std::vector<std::pair<int64_t, uint64_t>> seen_;
  int64_t small_[kBatch], large_[kBatch * 200], keys_[kBatch];
  char tiny_[kBatch * 5];
  float weight_[kBatch], probability_[kBatch];
};

}  // namespace

BOOST_AUTO_TEST_CASE(keys_count_up_from_zero_and_name_the_slot) {
  auto m = ring_of(10);
  const Written w = extend(*m, kWriter, 25);
  BOOST_TEST(w.keys == range(0, 25), boost::test_tools::per_element());
  for (uint64_t slot = 0; slot < 10; slot++) {
    const uint64_t key = slot < 5 ? 20 + slot : 10 + slot;
    BOOST_TEST(m->row(slot).word.load() == slot_word::done(key, kWriter));
    BOOST_TEST((pattern_in(*m, slot) == key));
  }
  BOOST_TEST(m->participant(kWriter).rows.load() == 25U);
  BOOST_TEST(m->participant(kWriter).last_write.load() > 0);
}

BOOST_AUTO_TEST_CASE(the_priority_goes_into_the_row) {
  auto m = make_segment();
  append_row(*m, kWriter, 0, 2.5F);
  append_row(*m, kWriter, 0);
  BOOST_TEST(m->row(0).priority.load() == 2.5F);
  BOOST_TEST(m->row(0).meta(false).link == kHasPriority);
  BOOST_TEST(m->row(1).meta(false).link == 0U);
}

BOOST_AUTO_TEST_CASE(a_busy_slot_is_skipped_and_its_row_written_elsewhere) {
  auto m = ring_of(8);
  extend(*m, kWriter, 8);
  SteppedWriter slow(*m, kOther);
  slow.take_ticket();  // key 8
  slow.seize();
  extend(*m, kWriter, 7, 100);  // keys 9 to 15
  const Written w = extend(*m, kWriter, 2, 200);
  BOOST_TEST(w.keys == range(17, 19), boost::test_tools::per_element());  // ticket 16 fell on the busy slot 0
  BOOST_TEST(m->row(0).word.load() == slot_word::busy(8, kOther));
  slow.finish({}, 8);
  BOOST_TEST((pattern_in(*m, 0) == 8U));
  BOOST_TEST((pattern_in(*m, 1) == 200U));
}

BOOST_AUTO_TEST_CASE(a_writer_that_was_lapped_leaves_the_newer_row_alone) {
  auto m = ring_of(4);
  extend(*m, kWriter, 4);
  m->row(0).word.store(slot_word::done(8, kOther));  // one turn ahead of ticket 4
  const Written w = extend(*m, kWriter, 1);
  BOOST_TEST(w.keys == range(5, 6), boost::test_tools::per_element());
  BOOST_TEST(m->row(0).word.load() == slot_word::done(8, kOther));
}

BOOST_AUTO_TEST_CASE(an_own_key_in_the_slot_counts_as_lapped_too) {
  auto m = ring_of(4);
  m->row(0).word.store(slot_word::voided(0));
  BOOST_TEST(extend(*m, kWriter, 1).keys == range(1, 2), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(a_full_turn_of_busy_slots_stalls_and_goes_on_when_one_comes_free) {
  for (uint64_t capacity : {1, 5, 200}) {
    auto m = ring_of(capacity);
    for (uint64_t s = 0; s < capacity; s++) m->row(s).word.store(slot_word::busy(s, kOther));
    m->header().head.store(capacity);
    BOOST_TEST((extend(*m, kWriter, 3).outcome == Append::kStalled));
    BOOST_TEST(m->header().head.load() >= 2 * capacity);           // every slot was tried
    BOOST_TEST(m->header().head.load() <= 2 * capacity + 2 * 64);  // and no ticket burnt beyond need
    m->row(capacity - 1).word.store(slot_word::voided(capacity - 1));
    BOOST_TEST((extend(*m, kWriter, 1).outcome == Append::kDone));
  }
}

BOOST_AUTO_TEST_CASE(a_writer_that_had_to_wait_goes_on_with_the_row_it_had_come_to) {
  auto m = ring_of(100);
  std::vector<RowMeta> meta(30);
  std::vector<int64_t> keys(30);
  std::vector<uint64_t> filled;
  uint64_t written = 0;
  auto fill = [&](uint64_t row, uint64_t slot) {
    filled.push_back(row);
    fill_row(*m, slot, row);
  };
  RingWriter ring(*m, kWriter);
  m->header().ticket_limit.store(10);
  BOOST_TEST((ring.append(30, meta.data(), keys.data(), written, fill) == Append::kLimited));
  BOOST_TEST(written == filled.size());
  BOOST_TEST(written < 30U);
  m->header().ticket_limit.store(kNever);
  BOOST_TEST((ring.append(30, meta.data(), keys.data(), written, fill) == Append::kDone));
  std::vector<uint64_t> every(30);
  for (uint64_t i = 0; i < 30; i++) every[i] = i;
  BOOST_TEST(filled == every, boost::test_tools::per_element());
  BOOST_TEST(keys == range(0, 30), boost::test_tools::per_element());
  BOOST_TEST(m->participant(kWriter).rows.load() == 30U);
}

BOOST_AUTO_TEST_CASE(the_limit_stops_a_writer_within_one_chunk) {
  auto m = ring_of(1000);
  m->header().ticket_limit.store(100);
  const Written w = extend(*m, kWriter, 500);
  BOOST_TEST((w.outcome == Append::kLimited));
  BOOST_TEST(w.keys.size() >= 100U);
  BOOST_TEST(w.keys.size() < 100U + kMaxChunk);
  BOOST_TEST((extend(*m, kWriter, 1).outcome == Append::kLimited));
}

BOOST_AUTO_TEST_CASE(what_a_writer_holds_is_bounded_and_announced_before_it_is_busy) {
  const std::pair<uint64_t, uint64_t> cases[] = {{1, 1}, {7, 1}, {8, 2}, {100, 25}, {256, 64}, {5000, 64}};
  for (auto [capacity, most] : cases) {
    auto m = ring_of(capacity);
    const uint64_t n = std::min<uint64_t>(capacity, 200);
    std::vector<RowMeta> meta(n);
    std::vector<int64_t> keys(n);
    uint64_t written = 0, largest = 0;
    bool inside = true;
    const Participant& entry = m->participant(kWriter);
    RingWriter(*m, kWriter).append(n, meta.data(), keys.data(), written, [&](uint64_t, uint64_t slot) {
      const uint64_t word = m->row(slot).word.load(), key = slot_word::key1(word) - 1;
      inside &= slot_word::is_busy(word) && (word >> 1 & 0x7fff) == kWriter;
      inside &= entry.first.load() <= key && key < entry.first.load() + entry.count.load();
      largest = std::max<uint64_t>(largest, entry.count.load());
    });
    BOOST_TEST(inside);
    BOOST_TEST(largest == std::min(most, n));
  }
}

BOOST_AUTO_TEST_CASE(the_ticket_a_learner_waits_for_wakes_it) {
  auto m = ring_of(8);
  Header& h = m->header();
  h.wake_at.store(3);
  extend(*m, kWriter, 3);
  BOOST_TEST(h.rows_signal.load() == 0U);
  extend(*m, kWriter, 1);
  BOOST_TEST(h.rows_signal.load() == 1U);
  BOOST_TEST(h.wake_at.load() == kNever);
  extend(*m, kWriter, 4);
  BOOST_TEST(h.rows_signal.load() == 1U);
}

BOOST_AUTO_TEST_CASE(reclaiming_frees_what_the_dead_held_busy_and_nothing_else) {
  auto m = ring_of(16);
  extend(*m, kWriter, 16);
  SteppedWriter dead(*m, kOther), alive(*m, 3);
  alive.take_ticket();
  alive.seize();
  const uint64_t first = m->header().head.fetch_add(3);  // a chunk: one row done, one busy, one ticket not yet used
  m->participant(kOther).first.store(first);
  m->participant(kOther).count.store(3);
  m->row(first % 16).word.store(slot_word::done(first, kOther));
  m->row((first + 1) % 16).word.store(slot_word::busy(first + 1, kOther));
  for (int times = 0; times < 2; times++) {
    reclaim(*m, kOther);
    BOOST_TEST(m->row(alive.slot()).word.load() == slot_word::busy(alive.key(), 3));
    BOOST_TEST(m->row(first % 16).word.load() == slot_word::done(first, kOther));
    BOOST_TEST(m->row((first + 1) % 16).word.load() == slot_word::voided(first + 1));
    BOOST_TEST(m->row((first + 2) % 16).word.load() == slot_word::done(first + 2 - 16, kWriter));
    BOOST_TEST(m->participant(kOther).count.load() == 0U);
  }
}

BOOST_AUTO_TEST_CASE(a_damaged_table_entry_cannot_lead_reclaiming_out_of_the_ring) {
  auto m = ring_of(5);
  m->participant(kOther).first.store(kNever - 3);
  m->participant(kOther).count.store(std::numeric_limits<uint16_t>::max());
  reclaim(*m, kOther);
  BOOST_TEST(m->participant(kOther).count.load() == 0U);
}

BOOST_AUTO_TEST_CASE(threads_writing_at_once_get_distinct_keys_and_leave_whole_rows) {
  constexpr int kThreads = 4, kRounds = 300;
  auto m = ring_of(64);
  std::vector<std::vector<int64_t>> keys(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; t++)
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kRounds; i++)
        for (int64_t key : extend(*m, t + 1, 1 + i % 30, static_cast<uint64_t>(t) << 32 | i << 8).keys)
          keys[t].push_back(key);
    });
  for (std::thread& t : threads) t.join();
  std::set<int64_t> all;
  size_t count = 0;
  for (const auto& mine : keys) {
    BOOST_TEST(std::is_sorted(mine.begin(), mine.end()));
    all.insert(mine.begin(), mine.end());
    count += mine.size();
  }
  BOOST_TEST(all.size() == count);
  for (uint64_t slot = 0; slot < 64; slot++) {
    const uint64_t word = m->row(slot).word.load();
    BOOST_TEST(slot_word::is_row(word));
    BOOST_TEST(all.contains(static_cast<int64_t>(slot_word::key1(word)) - 1));
    BOOST_TEST(pattern_in(*m, slot).has_value());
  }
  settle(*m);
  BOOST_TEST(violation(*m) == "");
}

// Writers turn a small ring as fast as they can; every row drawn must be whole, and the one its key names.
BOOST_AUTO_TEST_CASE(draws_under_fast_writers_never_tear_a_row_nor_take_another_for_it) {
  constexpr uint64_t kRows = 30'000;
  for (uint64_t capacity : {12, 300}) {
    auto m = ring_of(capacity);
    std::atomic<int> writing{2};
    std::vector<std::vector<int64_t>> keys(2);  // of pattern writer << 32 | index
    std::vector<std::thread> writers;
    for (uint64_t w = 0; w < 2; w++)
      writers.emplace_back([&, w] {
        while (keys[w].size() < kRows) {
          const Written rows = extend(*m, static_cast<int>(w) + 1, 1 + keys[w].size() % 3, w << 32 | keys[w].size());
          keys[w].insert(keys[w].end(), rows.keys.begin(), rows.keys.end());
        }
        writing--;
      });
    Checker learner(*m);
    uint64_t step = 0;
    while (writing.load() > 0 && learner.seen().size() < 200'000) learner.draw(step++);
    for (std::thread& t : writers) t.join();
    BOOST_TEST(learner.draw(step));  // at the latest now
    BOOST_TEST(learner.torn() == 0U);
    uint64_t foreign = 0;
    for (auto [key, pattern] : learner.seen()) foreign += keys[pattern >> 32][pattern & 0xffffffff] != key;
    BOOST_TEST(foreign == 0U);
    BOOST_TEST_MESSAGE(learner.seen().size() << " rows drawn, " << m->header().redraws.load() << " drawn again");
    settle(*m);
    BOOST_TEST(violation(*m) == "");
  }
}

namespace {

// A writer that others take for dead while it copies the row of ticket 0: `meanwhile` then writes to its slot.
Append write_when_taken_for_dead(SegmentMemory& m, const std::function<void()>& meanwhile) {
  const RowMeta meta;
  int64_t key;
  uint64_t written = 0;
  return RingWriter(m, kWriter).append(1, &meta, &key, written, [&](uint64_t, uint64_t slot) {
    reclaim(m, kWriter);
    meanwhile();
    fill_row(m, slot, 77);
  });
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_row_written_beside_one_that_was_taken_for_dead_is_given_up_and_never_drawn_torn) {
  auto m = ring_of(4);
  BOOST_REQUIRE(m->liveness().take(kOther));
  const Append outcome = write_when_taken_for_dead(*m, [&] {
    extend(*m, kOther, 5, 100);  // keys 1 to 4, and where 4 lies key 0 was to be
    settle(*m);
    BOOST_TEST((pattern_in(*m, 0) == 103U));
  });
  BOOST_TEST((outcome == Append::kLost));
  BOOST_TEST(m->row(0).word.load() == slot_word::voided(4));
  Checker checker(*m);
  for (uint64_t step = 0; step < 50; step++) BOOST_REQUIRE(checker.draw(step));
  BOOST_TEST(checker.torn() == 0U);
  for (const auto& [key, pattern] : checker.seen()) BOOST_TEST(pattern == 99U + static_cast<uint64_t>(key));
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_CASE(a_writer_whose_slot_another_scribbled_on_writes_its_row_again) {
  auto m = ring_of(4);
  BOOST_REQUIRE(m->liveness().take(kOther));
  std::promise<void> taken, seized;
  std::thread late([&] {
    const Append outcome = write_when_taken_for_dead(*m, [&] {
      taken.set_value();
      seized.get_future().wait();
    });
    BOOST_TEST((outcome == Append::kLost));
  });
  taken.get_future().wait();
  BOOST_TEST(extend(*m, kOther, 3).keys == range(1, 4), boost::test_tools::per_element());
  const RowMeta meta;
  int64_t key = -1;
  uint64_t written = 0;
  const Append outcome = RingWriter(*m, kOther).append(1, &meta, &key, written, [&](uint64_t, uint64_t slot) {
    if (late.joinable()) {
      seized.set_value();
      late.join();
    }
    fill_row(*m, slot, 500);
  });
  BOOST_TEST((outcome == Append::kDone));
  BOOST_TEST(key == 5);
  BOOST_TEST(m->row(0).word.load() == slot_word::voided(4));
  BOOST_TEST((pattern_in(*m, 1) == 500U));
  settle(*m);
  BOOST_TEST(violation(*m) == "");
}

BOOST_AUTO_TEST_SUITE_END()
