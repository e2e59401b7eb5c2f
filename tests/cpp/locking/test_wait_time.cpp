#include <boost/test/unit_test.hpp>
#include <thread>
#include <vector>

#include "locking/wait_time.h"

BOOST_AUTO_TEST_SUITE(test_wait_time)

using namespace torchreplay;

namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kStart = 123'450 * kSecond;  // the beginning of a window

}  // namespace

BOOST_AUTO_TEST_CASE(waits_add_up_in_all_and_of_late) {
  WaitTime w{};
  w.add(2 * kSecond, kStart + 3 * kSecond);
  w.add(kSecond / 2, kStart + 9 * kSecond);
  BOOST_TEST(w.total_ns() == 2'500'000'000U);
  BOOST_TEST(w.recent_ns(kStart + 9 * kSecond) == 2'500'000'000U);
  w.add(kSecond, kStart + 12 * kSecond);
  BOOST_TEST(w.recent_ns(kStart + 12 * kSecond) == 3'500'000'000U);
  BOOST_TEST(w.recent_ns(kStart + 20 * kSecond) == 1'000'000'000U);
  BOOST_TEST(w.recent_ns(kStart + 30 * kSecond) == 0U);
  w.add(kSecond, kStart + 31 * kSecond);
  BOOST_TEST(w.recent_ns(kStart + 31 * kSecond) == 1'000'000'000U);
  BOOST_TEST(w.total_ns() == 4'500'000'000U);
}

BOOST_AUTO_TEST_CASE(the_recent_time_begins_with_the_window_before_but_not_before_the_segment_was_made) {
  BOOST_TEST(WaitTime::since(kStart + 3 * kSecond, 0) == kStart - 10 * kSecond);
  BOOST_TEST(WaitTime::since(kStart + 3 * kSecond, kStart - kSecond) == kStart - kSecond);
}

BOOST_AUTO_TEST_CASE(waits_of_many_at_once_are_all_counted) {
  WaitTime w{};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&] {
      for (int i = 0; i < 10'000; i++) w.add(5000, kStart + i * 1000);
    });
  for (std::thread& t : threads) t.join();
  BOOST_TEST(w.total_ns() == 200'000'000U);
  BOOST_TEST(w.recent_ns(kStart + kSecond) == 200'000'000U);
}

BOOST_AUTO_TEST_SUITE_END()
