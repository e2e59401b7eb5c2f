#include <boost/test/unit_test.hpp>
#include <map>
#include <memory>

#include "explorers.h"
#include "invariants.h"
#include "ragged.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_page_follower)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kWriter = 1, kSlow = 2;
constexpr uint32_t kMost = 60;  // 420 bytes in all, 7 pages of 64
constexpr uint64_t kPages = 40;

std::unique_ptr<SegmentMemory> ring_of(uint64_t capacity, uint64_t pages = kPages, const View& view = {}) {
  Plan plan = ragged_plan(capacity, pages * 64);
  plan.view = view;
  auto m = make_segment(plan);
  BOOST_REQUIRE(m->layout().pages.bytes == 64U);
  return m;
}

bool is_drawable(const SegmentMemory& m, uint64_t slot) { return m.tree().leaf(static_cast<int64_t>(slot)) > 0; }

void check(SegmentMemory& m) {
  settle(m);
  const std::string v = violation(m);
  BOOST_REQUIRE_MESSAGE(v.empty(), v);
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_row_goes_when_its_first_page_is_issued_again_and_not_before) {
  auto m = ring_of(100, 16);
  for (int i = 0; i < 4; i++) append_bytes(*m, kWriter, 256);  // all pages
  check(*m);
  BOOST_TEST(m->header().rows == 4U);
  append_bytes(*m, kWriter, 64);
  check(*m);
  BOOST_TEST(!is_drawable(*m, 0));
  for (uint64_t slot = 1; slot < 5; slot++) BOOST_TEST(is_drawable(*m, slot));
  for (int i = 0; i < 3; i++) append_bytes(*m, kWriter, 64);  // the rest of the row that is gone
  check(*m);
  BOOST_TEST(m->header().rows == 7U);
  BOOST_TEST(m->header().evicted_by_pages == 1U);
  BOOST_TEST(m->header().evicted_unsampled == 1U);
  append_bytes(*m, kWriter, 64);
  check(*m);
  BOOST_TEST(!is_drawable(*m, 1));
  BOOST_TEST(m->header().evicted_by_pages == 2U);
}

BOOST_AUTO_TEST_CASE(rows_without_values_stay_for_as_long_as_their_slots) {
  auto m = ring_of(10, 16);
  append_bytes(*m, kWriter, 0);
  for (int i = 0; i < 9; i++) append_bytes(*m, kWriter, 256);
  check(*m);
  BOOST_TEST(is_drawable(*m, 0));
  BOOST_TEST(m->header().rows == 5U);
  append_bytes(*m, kWriter, 0);
  check(*m);
  BOOST_TEST(m->at(0) == 11U);
}

BOOST_AUTO_TEST_CASE(a_page_whose_row_was_overwritten_evicts_nobody_else) {
  auto m = ring_of(3, 16);
  for (int i = 0; i < 9; i++) append_bytes(*m, kWriter, 64);  // each slot has had three rows
  check(*m);
  BOOST_TEST(m->header().rows == 3U);
  for (int i = 0; i < 30; i++) {
    append_bytes(*m, kWriter, i % 3 ? 0 : 128);
    check(*m);
    BOOST_TEST(m->header().rows == 3U);
  }
  BOOST_TEST(m->header().evicted_by_pages == 0U);
}

BOOST_AUTO_TEST_CASE(a_row_whose_writer_was_stopped_for_a_turn_of_the_pages_is_none) {
  auto m = ring_of(10, 16);
  SteppedRun run(*m, kSlow, 7, 30);
  while (!run.advance()) {
  }
  BOOST_REQUIRE(run.run().pages > 0U);
  for (int i = 0; i < 5; i++) append_bytes(*m, kWriter, 256);
  check(*m);
  SteppedWriter slow(*m, kSlow);
  slow.take_ticket();
  slow.seize();
  slow.finish({}, [&](uint64_t slot) { run.describe(slot); });
  check(*m);
  BOOST_TEST(!is_drawable(*m, slow.slot()));
  BOOST_TEST(m->row(slow.slot()).word.load() == slot_word::voided(slow.key()));
  for (int i = 0; i < 4; i++) append_bytes(*m, kWriter, 256);
  check(*m);
  BOOST_TEST(m->header().rows == 4U);
}

BOOST_AUTO_TEST_CASE(a_row_whose_pages_nobody_has_followed_yet_waits_for_the_next_absorption) {
  auto m = ring_of(4, 16);
  for (int i = 0; i < 4; i++) append_bytes(*m, kWriter, 128);
  check(*m);
  // A learner has looked at the pages, and the row comes before it looks at its slot.
  const uint64_t followed = m->header().followed;
  append_bytes(*m, kWriter, 128);
  PageFollower follower(*m);
  Run run;
  const uint64_t word = m->row(0).word.load();
  BOOST_TEST((follower.look(0, word, run) == PageFollower::Fate::kUnknown));
  BOOST_TEST(m->row(0).word.load() == word);
  m->header().followed = followed + 2;
  BOOST_TEST((follower.look(0, word, run) == PageFollower::Fate::kHeld));
  BOOST_TEST((run == Run{followed, 2}));
  check(*m);
  BOOST_TEST(m->at(0) == 5U);
}

BOOST_AUTO_TEST_CASE(a_row_whose_pages_were_spoilt_goes_when_it_could_not_be_drawn) {
  auto m = ring_of(4, 16);
  for (int i = 0; i < 4; i++) append_bytes(*m, kWriter, 256);
  check(*m);
  m->page_word(6) = slot_word::voided(6);  // of the second row
  {
    const SegmentLock lock(*m);
    for (uint64_t slot = 0; slot < 4; slot++) Absorber(*m).resync(slot, m->header().head);
  }
  for (uint64_t slot = 0; slot < 4; slot++) BOOST_TEST(is_drawable(*m, slot) == (slot != 1));
  check(*m);
}

BOOST_AUTO_TEST_CASE(a_row_of_lengths_that_no_writer_writes_is_none) {
  for (uint32_t length : {17U * 64, (1U << 31) - 1, 1U << 31, 0U}) {
    auto m = ring_of(4, 16);
    append_bytes(*m, kWriter, 64);
    *m->length_of_row(append_bytes(*m, kWriter, 64), 1) = length;
    append_bytes(*m, kWriter, 64);
    check(*m);
    for (uint64_t slot = 0; slot < 3; slot++) BOOST_TEST(is_drawable(*m, slot) == (slot != 1));
  }
}

BOOST_AUTO_TEST_CASE(items_of_several_rows_go_with_the_first_row_that_has_lost_its_pages) {
  auto m = ring_of(20, 16, transitions(2));
  Stream stream;
  const auto write = [&](const RowMeta& meta) {
    const uint64_t slot = append_bytes(*m, kWriter, 128, meta);
    stream.wrote(m->header().head.load() - 1, meta);
    return slot;
  };
  write(stream.reset());
  for (int i = 0; i < 7; i++) write(stream.next());
  check(*m);
  for (uint64_t slot = 0; slot < 8; slot++) BOOST_TEST(is_drawable(*m, slot) == (slot < 6));
  write(stream.next());
  check(*m);
  for (uint64_t slot = 0; slot < 9; slot++) BOOST_TEST(is_drawable(*m, slot) == (slot > 0 && slot < 7));
}

BOOST_AUTO_TEST_CASE(more_pages_than_one_chunk_are_followed_in_several_steps) {
  auto m = make_segment(ragged_plan(10'000, 200'000 * 64));
  BOOST_REQUIRE(m->layout().pages.count == 200'000U);
  for (int i = 0; i < 8; i++) append_bytes(*m, kWriter, 40'000 * 64);
  BOOST_TEST(PageFollower(*m).step() == false);
  BOOST_TEST(m->header().followed == 120'000U + PageFollower::kChunk);  // pages of two turns ago need no look
  check(*m);
  BOOST_TEST(m->header().rows == 5U);
}

namespace {

// Random interleavings of writers of pages and rows that lag and die, and of absorptions.
class Play {
 public:
  Play(uint64_t capacity, uint64_t pages, int writers, unsigned seed, const View& view = {})
      : m_(ring_of(capacity, pages, view)), random_(seed), pages_(pages) {
    for (int w = 0; w < writers; w++) members_.push_back({w + 1, nullptr, SteppedWriter(*m_, w + 1), kIdle, {}});
  }

  void step() {
    Member& member = members_[random_() % members_.size()];
    switch (random_() % 40) {
      case 0:
        return absorb();
      case 1:
        return die(member);
      case 2:
        return part_of_an_absorption();
      default:
        return advance(member);
    }
  }

  // What the rows must be that can be drawn, from what was written alone.
  void absorb() {
    check(*m_);
    const uint64_t head = m_->header().page_head.load();
    std::map<uint64_t, Row> expected;
    for (const auto& [key, row] : written_) expected[key % m_->capacity()] = row;
    for (uint64_t slot = 0; slot < m_->capacity(); slot++) {
      const auto found = expected.find(slot);
      const bool kept = found != expected.end() && !found->second.overwritten &&
                        (found->second.run.pages == 0 || found->second.run.first + pages_ >= head);
      const uint64_t word = m_->row(slot).word.load();
      const bool there = m_->at(slot) != 0;
      if (slot_word::is_busy(word)) {
        BOOST_REQUIRE(!there);
        continue;
      }
      BOOST_REQUIRE_EQUAL(there, kept);
      if (!there) continue;
      uint64_t number = 0, key = 0;
      BOOST_REQUIRE((look_at(*m_, slot, kMost, number, &key) == Found::kWhole));
      BOOST_REQUIRE(number == found->second.number);
      BOOST_REQUIRE(m_->at(slot) == key + 1);
      drawable_ += is_drawable(*m_, slot);
    }
  }

  void finish() {
    for (Member& member : members_) die(member);
    absorb();
    BOOST_REQUIRE(busy_pages(*m_) == 0U);
    for (const Member& member : members_) BOOST_REQUIRE(m_->run_in_flight(member.id).first1.load() == 0U);
  }

  uint64_t written() const { return written_.size(); }
  uint64_t drawable() const { return drawable_; }
  uint64_t by_pages() const { return m_->header().evicted_by_pages; }

 private:
  enum State { kIdle, kRun, kTicket, kBusy };
  struct Row {
    uint64_t number = 0;
    Run run;
    bool overwritten = false;
  };
  struct Member {
    int id;
    std::unique_ptr<SteppedRun> run;
    SteppedWriter row;
    State state;
    Stream stream;
  };

  void advance(Member& w) {
    switch (w.state) {
      case kIdle:
        w.run = std::make_unique<SteppedRun>(*m_, w.id, number_++, kMost);
        w.state = kRun;
        break;
      case kRun:
        if (w.run->advance()) w.state = kTicket;
        break;
      case kTicket:
        w.row.take_ticket();
        if (!w.row.seize()) break;
        w.state = kBusy;
        for (auto& [key, row] : written_) row.overwritten |= key % m_->capacity() == w.row.slot();
        break;
      case kBusy: {
        RowMeta meta;
        if (m_->layout().view.linked()) {
          meta = w.stream.running && random_() % 8 ? w.stream.next(random_() % 5 ? 0 : kTerminated) : w.stream.reset();
          w.stream.wrote(w.row.key(), meta);
        }
        w.row.finish(meta, [&](uint64_t slot) { w.run->describe(slot); });
        w.run->forget();
        written_[w.row.key()] = {w.run->values().number, w.run->run(), false};
        w.state = kIdle;
        break;
      }
    }
  }

  void die(Member& w) {
    reclaim(*m_, w.id);
    w.state = kIdle;
    w.stream = {};
  }

  // One step of a learner, and others come in between.
  void part_of_an_absorption() {
    const uint64_t head = m_->header().head.load();
    SegmentLock lock(*m_);
    Absorber(*m_).step(head);
  }

  std::unique_ptr<SegmentMemory> m_;
  std::mt19937_64 random_;
  uint64_t pages_, number_ = 0, drawable_ = 0;
  std::vector<Member> members_;
  std::map<uint64_t, Row> written_;
};

}  // namespace

BOOST_AUTO_TEST_CASE(whatever_writers_do_the_rows_there_are_those_that_lost_neither_slot_nor_first_page) {
  uint64_t written = 0, drawable = 0, by_pages = 0;
  for (unsigned seed = 0; seed < 300; seed++) {
    const uint64_t capacity = 1 + seed % 13, pages = 32 + seed * 7 % 30;
    if (pages * 4 / capacity / 2 >= 64) continue;  // pages of more than 64 bytes
    const View view = seed % 3 ? View{} : transitions(1 + seed % 2);
    BOOST_TEST_CONTEXT("seed " << seed) {
      Play play(capacity, pages, 1 + static_cast<int>(seed % 4), seed, view);
      for (int i = 0; i < 3000; i++) play.step();
      play.finish();
      written += play.written();
      drawable += play.drawable();
      by_pages += play.by_pages();
    }
  }
  BOOST_TEST(written > 10'000U);
  BOOST_TEST(drawable > 10'000U);
  BOOST_TEST(by_pages > 1000U);
}

BOOST_AUTO_TEST_SUITE_END()
