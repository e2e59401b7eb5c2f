#include <boost/test/unit_test.hpp>
#include <random>

#include "segment/run.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_run)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

__extension__ using Wide = unsigned __int128;

// Tokens and their probabilities, bytes, and points.
Plan ragged_plan() {
  Plan plan;
  plan.capacity = 8;
  plan.ragged = {{Element::kI32, 4, 0}, {Element::kF32, 4, 0}, {Element::kU8, 1, 1}, {Element::kF32, 12, 2}};
  plan.ragged_bytes = 6400;
  return plan;
}

// Bytes of a row's values, each at a multiple of 8.
Wide bytes_of(const std::vector<RaggedField>& fields, const std::vector<uint32_t>& lengths) {
  Wide bytes = 0;
  for (const RaggedField& f : fields) bytes += (Wide{lengths[f.group]} * f.nbytes + 7) / 8 * 8;
  return bytes;
}

struct Read {
  bool sound;
  Run run;
  std::vector<uint32_t> lengths;
};

Read read(const SegmentMemory& m, uint64_t slot) {
  Read r{false, {}, std::vector<uint32_t>(m.layout().pages.groups)};
  r.sound = read_run(m, slot, r.run, r.lengths.data());
  return r;
}

void describe(const SegmentMemory& m, uint64_t slot, uint64_t run1, const std::vector<uint32_t>& lengths) {
  *m.run1_of_row(slot) = run1;
  for (size_t g = 0; g < lengths.size(); g++) *m.length_of_row(slot, g) = lengths[g];
}

}  // namespace

BOOST_AUTO_TEST_CASE(values_lie_in_the_order_of_the_spec_each_at_a_multiple_of_8) {
  const Plan plan = ragged_plan();
  const uint32_t lengths[] = {3, 5, 2};
  uint64_t offsets[4];
  BOOST_TEST(place_values(plan.ragged, lengths, offsets) == 64U);
  BOOST_TEST(offsets[0] == 0U);   // 12 bytes
  BOOST_TEST(offsets[1] == 16U);  // 12 bytes
  BOOST_TEST(offsets[2] == 32U);  // 5 bytes
  BOOST_TEST(offsets[3] == 40U);  // 24 bytes
  const uint32_t none[] = {0, 0, 0};
  BOOST_TEST(place_values(plan.ragged, none, offsets) == 0U);
}

BOOST_AUTO_TEST_CASE(a_size_that_64_bits_do_not_hold_is_told_from_all_others) {
  std::mt19937_64 random(3);
  int without_size = 0;
  for (int k = 0; k < 10'000; k++) {
    std::vector<RaggedField> fields;
    for (uint32_t f = 0; f < 1 + random() % 5; f++) fields.push_back({Element::kU8, random() >> random() % 64, f % 2});
    const std::vector<uint32_t> lengths = {static_cast<uint32_t>(random() >> random() % 32),
                                           static_cast<uint32_t>(random() >> random() % 32)};
    const Wide bytes = bytes_of(fields, lengths);
    const bool fits = bytes < Wide{kNoSize} - 16;
    if (bytes >= Wide{kNoSize} - 16 && bytes <= Wide{kNoSize}) continue;  // on the border both are right
    BOOST_TEST(place_values(fields, lengths.data(), nullptr) == (fits ? static_cast<uint64_t>(bytes) : kNoSize));
    without_size += !fits;
  }
  BOOST_TEST(without_size > 100);
}

BOOST_AUTO_TEST_CASE(pages_and_hidden_fields_are_found_again_when_a_segment_is_opened) {
  auto made = make_segment(ragged_plan());
  auto m = open_segment(Descriptor::duplicate(made->fd()), kNonce);
  const Layout &a = made->layout(), &b = m->layout();
  BOOST_TEST(a.hash() == b.hash());
  BOOST_TEST(b.pages.count == 100U);
  BOOST_TEST(b.ragged.size() == 4U);
  for (size_t f = 0; f < b.ragged.size(); f++) {
    BOOST_TEST((b.ragged[f].element == a.ragged[f].element));
    BOOST_TEST(b.ragged[f].nbytes == a.ragged[f].nbytes);
    BOOST_TEST(b.ragged[f].group == a.ragged[f].group);
  }
  made->page(99)[63] = 7;
  BOOST_TEST(m->page(99)[63] == 7);
}

BOOST_AUTO_TEST_CASE(a_run_is_read_with_the_lengths_of_its_values) {
  auto m = make_segment(ragged_plan());
  m->header().page_head = 240;
  describe(*m, 3, 226, {10, 70, 3});  // 40 + 40 + 72 + 40 bytes
  const Read r = read(*m, 3);
  BOOST_TEST(r.sound);
  BOOST_TEST(r.run.first == 225U);
  BOOST_TEST(r.run.pages == 3U);
  BOOST_TEST(r.lengths[1] == 70U);
}

BOOST_AUTO_TEST_CASE(a_row_without_values_has_no_run) {
  auto m = make_segment(ragged_plan());
  m->header().page_head = 240;
  describe(*m, 3, 0, {0, 0, 0});
  BOOST_TEST(read(*m, 3).sound);
  BOOST_TEST(read(*m, 3).run.pages == 0U);
  describe(*m, 3, 7, {0, 0, 0});
  BOOST_TEST(!read(*m, 3).sound);
  describe(*m, 3, 0, {0, 1, 0});
  BOOST_TEST(!read(*m, 3).sound);
}

BOOST_AUTO_TEST_CASE(no_run_and_no_lengths_that_anybody_may_have_put_there_lead_past_an_end) {
  auto m = make_segment(ragged_plan());
  const Pages& pages = m->layout().pages;
  std::mt19937_64 random(5);
  int sound = 0, unsound = 0;
  for (int k = 0; k < 200'000; k++) {
    const uint64_t head = random() % 2 ? random() % 400 : random() >> random() % 64;
    m->header().page_head = head;
    uint64_t run1 = random() % 4 ? random() % (std::min<uint64_t>(head, 1 << 20) + 3) : random() >> random() % 64;
    std::vector<uint32_t> lengths;
    for (int g = 0; g < 3; g++)
      lengths.push_back(static_cast<uint32_t>(random() % 3 ? random() % 300 : random() >> random() % 64));
    describe(*m, 5, run1, lengths);
    // What a writer may write: at most a quarter of the pages, not over the end, of tickets that were taken.
    const Wide bytes = bytes_of(m->layout().ragged, lengths), n = (bytes + pages.bytes - 1) / pages.bytes;
    bool may = n <= 25 && std::ranges::all_of(lengths, [](uint32_t l) { return l < 1U << 31; });
    if (bytes == 0) may &= run1 == 0;
    if (bytes > 0) may &= run1 > 0 && (run1 - 1) % 100 + n <= 100 && Wide{run1} - 1 + n <= Wide{head};
    const Read r = read(*m, 5);
    if (r.sound != may) BOOST_FAIL("run " << run1 << ", head " << head << ", " << static_cast<uint64_t>(n) << " pages");
    if (may && n > 0) BOOST_REQUIRE((r.run == Run{run1 - 1, static_cast<uint64_t>(n)}));
    (may ? sound : unsound)++;
  }
  BOOST_TEST(sound > 5'000);
  BOOST_TEST(unsound > 10'000);
}

BOOST_AUTO_TEST_CASE(a_run_that_would_go_over_the_end_begins_at_the_next_turn) {
  auto m = make_segment(ragged_plan());
  for (uint64_t head = 0; head < 300; head++)
    for (uint64_t n = 1; n <= 25; n++) {
      const uint64_t first = start_of_run(*m, head, n);
      const bool fits = head % 100 + n <= 100;
      if (first != (fits ? head : (head / 100 + 1) * 100)) BOOST_FAIL(n << " pages at " << head);
    }
}

BOOST_AUTO_TEST_CASE(a_run_is_intact_as_long_as_each_page_has_its_ticket) {
  auto m = make_segment(ragged_plan());
  const Run run{203, 4};
  for (uint64_t i = 0; i < 4; i++) m->page_word(3 + i) = slot_word::done(203 + i, 1);
  BOOST_TEST(is_intact(*m, run));
  BOOST_TEST(is_intact(*m, Run{}));
  for (uint64_t i = 0; i < 4; i++)
    for (uint64_t word : {uint64_t{0}, slot_word::busy(203 + i, 1), slot_word::voided(203 + i),
                          slot_word::done(103 + i, 1), slot_word::done(303 + i, 1)}) {
      m->page_word(3 + i) = word;
      BOOST_TEST(!is_intact(*m, run));
      m->page_word(3 + i) = slot_word::done(203 + i, 2);
      BOOST_TEST(is_intact(*m, run));
    }
}

BOOST_AUTO_TEST_SUITE_END()
