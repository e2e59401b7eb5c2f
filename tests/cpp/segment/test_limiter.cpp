#include <boost/test/unit_test.hpp>
#include <memory>
#include <random>

#include "invariants.h"
#include "segment/limiter.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_limiter)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

// Reverb's conditions for one insert and for `n` draws, restated from its rate_limiter.h with nothing deleted.
struct Reverb {
  double ratio, min_diff, max_diff;
  uint64_t min_size;

  bool can_insert(uint64_t inserted, uint64_t sampled) const {
    if (inserted + 1 <= min_size) return true;
    return static_cast<double>(inserted + 1) * ratio - static_cast<double>(sampled) <= max_diff;
  }
  bool can_sample(uint64_t inserted, uint64_t sampled, uint64_t n) const {
    if (inserted < min_size) return false;
    return static_cast<double>(inserted) * ratio - static_cast<double>(sampled) - static_cast<double>(n) >= min_diff;
  }
};

struct Counters {
  std::unique_ptr<Header> header = std::make_unique<Header>();

  Counters(const LimiterConfig& config, uint64_t inserted, uint64_t sampled) {
    header->limiters[0] = config;
    header->inserted = inserted;
    header->sampled = sampled;
  }
  Limiter limiter() { return Limiter(*header); }
  uint64_t limit() const { return header->ticket_limit.load(); }
};

// Ratios and bounds that binary fractions hold exactly, so that both arithmetics must agree to the last insert.
Reverb any_reverb(std::mt19937_64& random) {
  const double ratios[] = {0.125, 0.25, 0.5, 1, 1.5, 3, 8, 32, 100};
  const double centre = static_cast<double>(random() % 2000) - 500, error = static_cast<double>(random() % 800) / 4;
  return {ratios[random() % std::size(ratios)], centre - error, centre + error, 1 + random() % 300};
}

}  // namespace

BOOST_AUTO_TEST_CASE(draws_are_admitted_exactly_when_reverb_admits_them) {
  std::mt19937_64 random(1);
  for (int k = 0; k < 200'000; k++) {
    const Reverb reverb = any_reverb(random);
    const uint64_t inserted = random() % 1000, sampled = random() % 5000, n = 1 + random() % 512;
    Counters c({reverb.min_size, reverb.ratio, reverb.min_diff, reverb.max_diff}, inserted, sampled);
    if (c.limiter().can_sample(n) == reverb.can_sample(inserted, sampled, n)) continue;
    BOOST_FAIL("ratio " << reverb.ratio << " inserted " << inserted << " sampled " << sampled << " n " << n);
  }
}

BOOST_AUTO_TEST_CASE(needed_is_the_smallest_number_of_inserts_that_admits_the_draw) {
  std::mt19937_64 random(2);
  for (int k = 0; k < 20'000; k++) {
    const Reverb reverb = any_reverb(random);
    const uint64_t sampled = random() % 5000, n = 1 + random() % 512;
    Counters c({reverb.min_size, reverb.ratio, reverb.min_diff, reverb.max_diff}, 0, sampled);
    const uint64_t needed = c.limiter().needed(n);
    if (!reverb.can_sample(needed, sampled, n) || (needed > 1 && reverb.can_sample(needed - 1, sampled, n)))
      BOOST_FAIL("needed " << needed << " ratio " << reverb.ratio << " sampled " << sampled << " n " << n);
  }
}

BOOST_AUTO_TEST_CASE(a_rule_admits_inserts_without_a_segment_exactly_as_far_as_reverb_does) {
  std::mt19937_64 random(7);
  for (int k = 0; k < 20'000; k++) {
    const Reverb reverb = any_reverb(random);
    const uint64_t sampled = random() % 5000;
    const LimiterConfig config{reverb.min_size, reverb.ratio, reverb.min_diff, reverb.max_diff};
    const uint64_t admitted = LimiterRule(config).admitted(static_cast<double>(sampled), 0);
    if ((admitted > 0 && !reverb.can_insert(admitted - 1, sampled)) || reverb.can_insert(admitted, sampled))
      BOOST_FAIL("admitted " << admitted << " ratio " << reverb.ratio << " sampled " << sampled);
  }
}

BOOST_AUTO_TEST_CASE(tickets_are_admitted_exactly_as_far_as_reverb_admits_inserts) {
  std::mt19937_64 random(3);
  for (int k = 0; k < 20'000; k++) {
    const Reverb reverb = any_reverb(random);
    const uint64_t inserted = 1 + random() % 1000, sampled = random() % 5000, head = inserted + random() % 100;
    Counters c({reverb.min_size, reverb.ratio, reverb.min_diff, reverb.max_diff}, inserted, sampled);
    c.limiter().publish(head, kMaxKeys, 1);
    uint64_t more = 0;
    while (reverb.can_insert(inserted + more, sampled)) more++;
    if (c.limit() != head + more) BOOST_FAIL("limit " << c.limit() << " expected " << head + more);
  }
}

BOOST_AUTO_TEST_CASE(a_limiter_set_later_counts_as_if_its_minimum_had_just_come_and_nothing_had_been_drawn) {
  std::mt19937_64 random(4);
  for (int k = 0; k < 20'000; k++) {
    const Reverb reverb = any_reverb(random);
    const uint64_t inserted = random() % 1000, sampled = random() % 5000;
    Counters c({7, 2, -3, 11}, inserted, sampled);
    change_limiter(*c.header, {reverb.min_size, reverb.ratio, reverb.min_diff, reverb.max_diff});
    c.header->inserted += random() % 50;
    c.header->sampled += random() % 400;
    const uint64_t came = std::min(inserted, reverb.min_size) + c.header->inserted - inserted;
    const uint64_t drawn = c.header->sampled - sampled, n = 1 + random() % 512, head = 10'000;
    if (c.limiter().can_sample(n) != reverb.can_sample(came, drawn, n))
      BOOST_FAIL("ratio " << reverb.ratio << " came " << came << " drawn " << drawn << " n " << n);
    c.limiter().publish(head, kMaxKeys, 1);
    uint64_t more = 0;
    while (reverb.can_insert(came + more, drawn)) more++;
    if (c.limit() != head + more) BOOST_FAIL("limit " << c.limit() << " expected " << head + more);
  }
}

BOOST_AUTO_TEST_CASE(a_draw_taken_back_after_the_limiter_was_changed_counts_against_nobody) {
  Counters c({1, 1, -10, 10}, 100, 50);
  change_limiter(*c.header, {1, 1, -10, 10});
  c.header->sampled -= 8;  // of a batch that was being drawn
  BOOST_TEST(c.limiter().can_sample(8));
  c.limiter().publish(100, kMaxKeys, 1);
  BOOST_TEST(c.limit() == 100U + 10 - 8 - 1);
}

BOOST_AUTO_TEST_CASE(without_a_ratio_writers_never_wait_and_draws_wait_for_min_size) {
  Counters c({100, 0, 0, 0}, 99, 1'000'000);
  BOOST_TEST(!c.limiter().can_sample(1));
  BOOST_TEST(c.limiter().needed(512) == 100U);
  c.limiter().publish(1234, kMaxKeys, 50);
  BOOST_TEST(c.limit() == kMaxKeys);
  c.header->inserted = 100;
  BOOST_TEST(c.limiter().can_sample(512));
}

BOOST_AUTO_TEST_CASE(an_empty_buffer_needs_one_item) {
  Counters c({0, 0, 0, 0}, 0, 0);
  BOOST_TEST(c.limiter().needed(1) == 1U);
  BOOST_TEST(!c.limiter().can_sample(1));
}

BOOST_AUTO_TEST_CASE(what_a_waiting_learner_needs_is_admitted_beyond_the_ratio) {
  Counters c({1, 1, 0, 10}, 10, 0);
  c.limiter().publish(10, kMaxKeys, 10);
  BOOST_TEST(c.limit() == 10U);  // the learner is behind: writers wait
  c.limiter().demand(500);
  c.limiter().publish(10, kMaxKeys, 10);
  BOOST_TEST(c.limit() == 500U);
}

BOOST_AUTO_TEST_CASE(nobody_goes_on_for_longer_than_what_may_be_overwritten_unseen) {
  Counters c({10, 1, -100, 100}, 20, 0);
  c.limiter().publish(25, 30, 20);
  BOOST_TEST(c.limit() == 55U);
  c.limiter().publish(25, 200, 20);
  BOOST_TEST(c.limit() == 105U);  // 80 items more, as the ratio admits
  Counters free({10, 0, 0, 0}, 20, 0);
  free.limiter().publish(25, 30, 20);
  BOOST_TEST(free.limit() == kMaxKeys);
}

BOOST_AUTO_TEST_CASE(lost_tickets_do_not_count_as_inserts) {
  Counters c({20, 1, -5, 5}, 12, 0);
  c.limiter().publish(40, kMaxKeys, 12);  // 28 of 40 tickets were lost: 8 more items are wanted all the same
  BOOST_TEST(c.limit() == 48U);
}

BOOST_AUTO_TEST_CASE(with_nothing_to_draw_writers_are_admitted) {
  Counters c({1, 1, 0, 1}, 50, 0);
  c.limiter().publish(50, kMaxKeys, 1);
  BOOST_TEST(c.limit() == 50U);
  c.limiter().publish(50, kMaxKeys, 0);
  BOOST_TEST(c.limit() > 50U);
}

BOOST_AUTO_TEST_CASE(a_raised_limit_wakes_the_writers_that_sleep_and_nobody_else) {
  Plan plan;
  plan.limiter = {1, 1, 0, 1};
  auto m = make_segment(plan);
  append_row(*m, 1);
  settle(*m);
  Header& h = m->header();
  publish_limit(*m);
  h.room_waiters.store(1);
  const uint32_t before = h.room_signal.load();
  publish_limit(*m);  // unchanged
  BOOST_TEST(h.room_signal.load() == before);
  h.sampled = 5;
  publish_limit(*m);
  BOOST_TEST(h.room_signal.load() == before + 1);
}

BOOST_AUTO_TEST_SUITE_END()
