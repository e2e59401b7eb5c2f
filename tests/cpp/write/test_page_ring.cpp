#include <boost/test/unit_test.hpp>
#include <set>
#include <thread>

#include "children.h"
#include "ragged.h"
#include "write/participants.h"

BOOST_AUTO_TEST_SUITE(test_page_ring)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kWriter = 1, kOther = 2;
constexpr uint32_t kMost = 120;  // 840 bytes in all, 14 pages

// Of 64 bytes a page.
std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, uint64_t pages) {
  auto m = make_segment(ragged_plan(capacity, pages * 64));
  BOOST_REQUIRE(m->layout().pages.bytes == 64U);
  BOOST_REQUIRE(m->layout().pages.count == pages);
  return m;
}

// Values of exactly so many pages.
struct PagesFill {
  SegmentMemory& m;
  uint32_t given[2];
  uint64_t runs = 0;

  PagesFill(SegmentMemory& m, uint32_t pages) : m(m), given{0, pages * 64} {}
  void operator()(uint64_t, uint64_t) const {}
  const uint32_t* lengths(uint64_t) const { return given; }
  void run(uint64_t, char* to) {
    runs++;
    zero_payload(to, given[1]);
  }
};

struct Taken {
  Append outcome;
  uint64_t slot;
};

Taken append_pages(SegmentMemory& m, int id, uint32_t pages) {
  const RowMeta meta;
  int64_t key = -1;
  uint64_t written = 0;
  PagesFill fill(m, pages);
  const Append outcome = RingWriter(m, id).append(1, &meta, &key, written, fill);
  return {outcome, written ? m.slot_of(static_cast<uint64_t>(key)) : kNever};
}

Run run_of(const SegmentMemory& m, uint64_t slot) {
  Run run;
  uint32_t lengths[2];
  BOOST_REQUIRE(read_run(m, slot, run, lengths));
  return run;
}

uint64_t page_head(const SegmentMemory& m) { return m.header().page_head.load(); }

}  // namespace

BOOST_AUTO_TEST_CASE(a_row_is_there_with_its_values_until_its_slot_or_its_first_page_is_taken_again) {
  std::mt19937_64 random(1);
  for (uint64_t capacity : {3, 10, 100})
    for (uint64_t pages : {60, 90}) {
      auto m = ring_of(capacity, pages);
      uint64_t number = 0, by_pages = 0;
      for (int round = 0; round < 150; round++) {
        const uint64_t n = 1 + random() % 3;
        const Appended rows = append_ragged(*m, kWriter, n, number, kMost);
        BOOST_REQUIRE((rows.outcome == Append::kDone));
        number += n;
        for (uint64_t slot = 0; slot < capacity; slot++) {
          uint64_t found = kNever, key = kNever;
          const Found what = look_at(*m, slot, kMost, found, &key);
          if (number <= slot) {
            BOOST_REQUIRE((what == Found::kGone));
            continue;
          }
          const uint64_t newest = number - 1 - (number - 1 - slot) % capacity;
          Run run;
          uint32_t lengths[2];
          BOOST_REQUIRE(read_run(*m, slot, run, lengths));
          // The bytes may be there although the first ticket was issued again: the run was skipped at the end.
          if (!has_lost_its_first_page(*m, run)) BOOST_REQUIRE((what == Found::kWhole));
          BOOST_REQUIRE((what == Found::kWhole || what == Found::kLost));
          by_pages += what == Found::kLost;
          BOOST_REQUIRE(found == newest);
          if (what == Found::kWhole) BOOST_REQUIRE(key == newest);
        }
      }
      BOOST_TEST(busy_pages(*m) == 0U);
      BOOST_TEST(m->run_in_flight(kWriter).first1.load() == 0U);
      if (capacity == 100) BOOST_TEST(by_pages > 0U);
    }
}

BOOST_AUTO_TEST_CASE(rows_whose_values_are_all_of_length_0_take_no_page) {
  auto m = ring_of(4, 16);
  for (int i = 0; i < 10; i++) {
    const Taken row = append_pages(*m, kWriter, 0);
    BOOST_TEST((row.outcome == Append::kDone));
    BOOST_TEST(run_of(*m, row.slot).pages == 0U);
  }
  append_row(*m, kWriter, 5);  // by a fill that says nothing of ragged fields
  BOOST_TEST(run_of(*m, 2).pages == 0U);
  BOOST_TEST(page_head(*m) == 0U);
}

BOOST_AUTO_TEST_CASE(no_run_goes_over_the_end_and_the_pages_before_it_are_skipped) {
  auto m = ring_of(8, 16);
  for (uint64_t first : {0, 3, 6, 9, 12, 16, 19, 22, 25, 28, 32}) {
    const Taken row = append_pages(*m, kWriter, 3);
    BOOST_TEST((run_of(*m, row.slot) == Run{first, 3}));
  }
}

BOOST_AUTO_TEST_CASE(values_of_more_than_a_quarter_of_the_pages_are_refused_before_anything_is_taken) {
  auto m = ring_of(8, 16);
  BOOST_CHECK_THROW(append_pages(*m, kWriter, 5), std::length_error);
  BOOST_TEST(page_head(*m) == 0U);
  BOOST_TEST(m->header().head.load() == 0U);
  BOOST_TEST((append_pages(*m, kWriter, 4).outcome == Append::kDone));
}

BOOST_AUTO_TEST_CASE(a_run_is_taken_behind_a_page_that_is_busy) {
  auto m = ring_of(8, 16);
  m->page_word(2) = slot_word::busy(2, kOther);
  m->page_word(6) = slot_word::busy(6, kOther);
  BOOST_TEST((run_of(*m, append_pages(*m, kWriter, 2).slot) == Run{0, 2}));
  BOOST_TEST((run_of(*m, append_pages(*m, kWriter, 4).slot) == Run{7, 4}));
  BOOST_TEST((run_of(*m, append_pages(*m, kWriter, 4).slot) == Run{11, 4}));
  BOOST_TEST((run_of(*m, append_pages(*m, kWriter, 3).slot) == Run{19, 3}));  // 15 and 16, then the busy one
  BOOST_TEST(m->page_word(2).load() == slot_word::busy(2, kOther));
  BOOST_TEST(busy_pages(*m) == 2U);
}

BOOST_AUTO_TEST_CASE(where_no_run_fits_between_busy_pages_a_writer_stalls_and_takes_no_page_from_others) {
  auto m = ring_of(8, 16);
  append_pages(*m, kWriter, 3);
  for (uint64_t p : {3, 7, 11, 15}) m->page_word(p) = slot_word::busy(p, kOther);
  const uint64_t head = page_head(*m);
  BOOST_TEST((append_pages(*m, kWriter, 4).outcome == Append::kStalled));
  BOOST_TEST(page_head(*m) == head);
  BOOST_TEST(m->run_in_flight(kWriter).first1.load() == 0U);
  BOOST_TEST((append_pages(*m, kWriter, 3).outcome == Append::kDone));
  m->page_word(11) = slot_word::voided(11);
  BOOST_TEST((append_pages(*m, kWriter, 4).outcome == Append::kDone));
}

BOOST_AUTO_TEST_CASE(a_writer_that_was_lapped_gives_its_run_up_and_what_it_had_taken_is_void) {
  auto m = ring_of(8, 16);
  m->page_word(2) = slot_word::done(18, kOther);  // a turn ahead
  BOOST_TEST((run_of(*m, append_pages(*m, kWriter, 4).slot) == Run{4, 4}));
  BOOST_TEST(m->page_word(0).load() == slot_word::voided(0));
  BOOST_TEST(m->page_word(1).load() == slot_word::voided(1));
  BOOST_TEST(m->page_word(2).load() == slot_word::done(18, kOther));
  BOOST_TEST(busy_pages(*m) == 0U);
}

BOOST_AUTO_TEST_CASE(a_writer_that_waits_between_the_pages_and_the_row_keeps_what_it_has_filled) {
  auto m = ring_of(8, 64);
  for (uint64_t s = 0; s < 8; s++) m->row(s).word.store(slot_word::busy(s, kOther));
  m->header().head.store(8);
  const RowMeta meta;
  int64_t key;
  uint64_t written = 0;
  PagesFill fill(*m, 5);
  RingWriter ring(*m, kWriter);
  BOOST_TEST((ring.append(1, &meta, &key, written, fill) == Append::kStalled));
  BOOST_TEST(m->run_in_flight(kWriter).first1.load() == 1U);
  BOOST_TEST(m->run_in_flight(kWriter).pages.load() == 5U);
  m->row(3).word.store(slot_word::voided(3));
  BOOST_TEST((ring.append(1, &meta, &key, written, fill) == Append::kDone));
  BOOST_TEST(fill.runs == 1U);
  BOOST_TEST((run_of(*m, 3) == Run{0, 5}));
  BOOST_TEST(m->run_in_flight(kWriter).first1.load() == 0U);
}

BOOST_AUTO_TEST_CASE(
    a_writer_that_gives_its_wait_up_leaves_no_run_in_flight_and_its_forked_child_takes_it_from_nobody) {
  auto m = ring_of(8, 64);
  for (uint64_t s = 0; s < 8; s++) m->row(s).word.store(slot_word::busy(s, kOther));
  m->header().head.store(8);
  {
    const RowMeta meta;
    int64_t key;
    uint64_t written = 0;
    PagesFill fill(*m, 5);
    std::optional<RingWriter> ring(std::in_place, *m, kWriter);
    BOOST_TEST((ring->append(1, &meta, &key, written, fill) == Append::kStalled));
    BOOST_TEST(Child([&] { ring.reset(); }).wait() == 0);
    BOOST_TEST(m->run_in_flight(kWriter).first1.load() == 1U);
  }
  BOOST_TEST(m->run_in_flight(kWriter).first1.load() == 0U);
  BOOST_TEST(busy_pages(*m) == 0U);
}

BOOST_AUTO_TEST_CASE(the_run_is_said_before_its_pages_are_busy_and_forgotten_when_its_row_is_there) {
  auto m = ring_of(8, 64);
  struct Fill : PagesFill {
    using PagesFill::PagesFill;
    bool said = true, own = true;
    void look() {
      const RunInFlight& line = m.run_in_flight(kWriter);
      said &= line.first1.load() == 1 && line.pages.load() == 3;
    }
    void operator()(uint64_t, uint64_t) {
      look();
      for (uint64_t t = 0; t < 3; t++) own &= m.page_word(t).load() == slot_word::done(t, kWriter);
    }
    void run(uint64_t, char*) {
      look();
      for (uint64_t t = 0; t < 3; t++) own &= m.page_word(t).load() == slot_word::busy(t, kWriter);
    }
  };
  Fill fill(*m, 3);
  const RowMeta meta;
  int64_t key;
  uint64_t written = 0;
  BOOST_TEST((RingWriter(*m, kWriter).append(1, &meta, &key, written, fill) == Append::kDone));
  BOOST_TEST(fill.said);
  BOOST_TEST(fill.own);
  BOOST_TEST(m->run_in_flight(kWriter).first1.load() == 0U);
}

BOOST_AUTO_TEST_CASE(reclaiming_frees_the_pages_that_the_dead_held_busy_and_no_others) {
  auto m = ring_of(8, 16);
  m->header().page_head = 30;
  m->run_in_flight(kOther).pages = 4;
  m->run_in_flight(kOther).first1 = 24;  // tickets 23 to 26
  m->page_word(7) = slot_word::done(23, kOther);
  m->page_word(8) = slot_word::busy(24, kOther);
  m->page_word(9) = slot_word::busy(25, kWriter);
  m->page_word(10) = slot_word::busy(26, kOther);
  m->page_word(11) = slot_word::busy(27, kOther);
  for (int times = 0; times < 2; times++) {
    reclaim(*m, kOther);
    BOOST_TEST(m->page_word(7).load() == slot_word::done(23, kOther));
    BOOST_TEST(m->page_word(8).load() == slot_word::voided(24));
    BOOST_TEST(m->page_word(9).load() == slot_word::busy(25, kWriter));
    BOOST_TEST(m->page_word(10).load() == slot_word::voided(26));
    BOOST_TEST(m->page_word(11).load() == slot_word::busy(27, kOther));
    BOOST_TEST(m->run_in_flight(kOther).first1.load() == 0U);
  }
}

BOOST_AUTO_TEST_CASE(a_damaged_line_cannot_lead_reclaiming_out_of_the_ring) {
  auto m = ring_of(8, 16);
  m->run_in_flight(kOther).pages = kNever;
  m->run_in_flight(kOther).first1 = kNever - 2;
  reclaim(*m, kOther);
  BOOST_TEST(m->run_in_flight(kOther).first1.load() == 0U);
}

BOOST_AUTO_TEST_CASE(a_writer_that_was_taken_for_dead_while_it_copied_spoils_what_was_written_beside_it) {
  auto m = ring_of(8, 16);
  BOOST_REQUIRE(m->liveness().take(kOther));
  struct Fill : PagesFill {
    using PagesFill::PagesFill;
    uint64_t beside = kNever;
    void run(uint64_t, char* to) {
      reclaim(m, kWriter);
      for (int i = 0; i < 5; i++) beside = append_pages(m, kOther, 4).slot;  // the last one where ours was to be
      zero_payload(to, 256);
    }
  };
  Fill fill(*m, 4);
  const RowMeta meta;
  int64_t key;
  uint64_t written = 0;
  m->run_in_flight(kWriter).first1 = 0;
  BOOST_TEST((RingWriter(*m, kWriter).append(1, &meta, &key, written, fill) == Append::kLost));
  BOOST_TEST(written == 0U);
  BOOST_TEST((run_of(*m, fill.beside) == Run{20, 4}));
  const Run torn = run_of(*m, 3);  // of the fourth of them
  BOOST_TEST((torn == Run{16, 4}));
  BOOST_TEST(!is_intact(*m, torn));
  BOOST_TEST(is_intact(*m, run_of(*m, 4)));
  BOOST_TEST(busy_pages(*m) == 0U);
}

BOOST_AUTO_TEST_CASE(a_writer_whose_pages_another_scribbled_on_fills_others) {
  auto m = ring_of(8, 64);
  BOOST_REQUIRE(m->liveness().take(kWriter));
  struct Fill : PagesFill {
    using PagesFill::PagesFill;
    void run(uint64_t, char*) {
      if (++runs == 1) m.page_word(1) = slot_word::voided(1);
    }
  };
  Fill fill(*m, 3);
  const RowMeta meta;
  int64_t key;
  uint64_t written = 0;
  BOOST_TEST((RingWriter(*m, kWriter).append(1, &meta, &key, written, fill) == Append::kDone));
  BOOST_TEST(fill.runs == 2U);
  BOOST_TEST((run_of(*m, 0) == Run{3, 3}));
  BOOST_TEST(is_intact(*m, Run{3, 3}));
  BOOST_TEST(busy_pages(*m) == 0U);
}

BOOST_AUTO_TEST_CASE(readers_beside_writers_that_turn_a_small_ring_never_get_a_torn_or_foreign_row) {
  constexpr uint64_t kRows = 4000;
  for (uint64_t capacity : {5, 100}) {
    auto m = ring_of(capacity, 90);
    std::atomic<int> writing{2};
    std::atomic<uint64_t> whole = 0;  // writers go on until the reader, which may be late, has met that many
    std::vector<std::thread> writers;
    for (int w = 0; w < 2; w++)
      writers.emplace_back([&, w] {
        for (uint64_t i = 0; i < kRows || whole <= 100; i += 3)
          append_ragged(*m, w + 1, 3, static_cast<uint64_t>(w) << 32 | i, kMost);
        writing--;
      });
    uint64_t torn = 0, lost = 0, unsound = 0;
    std::set<std::pair<uint64_t, uint64_t>> keys;
    for (uint64_t slot = 0; writing.load() > 0; slot = (slot + 1) % capacity) {
      uint64_t number = 0, key = 0;
      const Found what = look_at(*m, slot, kMost, number, &key);
      whole += what == Found::kWhole;
      torn += what == Found::kTorn;
      lost += what == Found::kLost;
      unsound += what == Found::kNoRun;
      if (what == Found::kWhole) keys.emplace(key, number);
    }
    for (std::thread& t : writers) t.join();
    BOOST_TEST(torn == 0U);
    BOOST_TEST(unsound == 0U);
    BOOST_TEST(whole > 100U);
    BOOST_TEST_MESSAGE(whole << " rows whole, " << lost << " without their pages");
    uint64_t before = kNever;
    for (auto [key, number] : keys) {
      BOOST_TEST(key != before);  // a key is of one row
      before = key;
    }
    BOOST_TEST(busy_pages(*m) == 0U);
    for (uint64_t slot = 0; slot < capacity; slot++) {
      uint64_t number = 0;
      const Found what = look_at(*m, slot, kMost, number);
      Run run = run_of(*m, slot);
      if (!has_lost_its_first_page(*m, run)) BOOST_TEST((what == Found::kWhole));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
