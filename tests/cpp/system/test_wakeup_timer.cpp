// When a thread wakes by itself for a caller that comes again and again.
#include <boost/test/unit_test.hpp>
#include <cstdint>

#include "system/wakeup_timer.h"

BOOST_AUTO_TEST_SUITE(test_wakeup_timer)

using namespace torchreplay;

namespace {

constexpr int64_t kMs = 1'000'000;

// After a hundred orders that came so far apart, the last one at time `ordered`.
WakeupTimer timer_of(int64_t step, int64_t& ordered) {
  WakeupTimer timer;
  ordered = 1'000 * kMs;
  for (int i = 0; i < 100; i++) timer.note_order(ordered += step);
  return timer;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_thread_is_up_a_little_after_the_next_order) {
  for (const int64_t step : {kMs / 2, 2 * kMs, 5 * kMs, 15 * kMs}) {
    int64_t ordered;
    const WakeupTimer timer = timer_of(step, ordered);
    BOOST_TEST(timer.allows_doze(1));
    const int64_t late = timer.doze_ns(ordered) - step;
    BOOST_TEST(late > 0);
    BOOST_TEST(late <= kMs);
    BOOST_TEST(late <= step / 3);
    BOOST_TEST(timer.doze_ns(ordered + step / 2) == step - step / 2 + late);
    BOOST_TEST(timer.doze_ns(ordered + 2 * step) <= 0);  // it is overdue
  }
}

BOOST_AUTO_TEST_CASE(a_thread_of_which_nobody_knows_when_the_next_order_comes_is_woken) {
  int64_t ordered;
  BOOST_TEST(!timer_of(30 * kMs, ordered).allows_doze(2));
  BOOST_TEST(!timer_of(1'000 * kMs, ordered).allows_doze(2));
}

BOOST_AUTO_TEST_CASE(a_thread_that_has_too_little_drawn_for_being_late_is_woken) {
  int64_t ordered;
  const WakeupTimer timer = timer_of(kMs / 20, ordered);
  BOOST_TEST(!timer.allows_doze(1));
  BOOST_TEST(timer.allows_doze(10));
}

BOOST_AUTO_TEST_SUITE_END()
