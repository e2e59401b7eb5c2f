#include <boost/test/unit_test.hpp>
#include <vector>

#include "system/streaming.h"

BOOST_AUTO_TEST_SUITE(test_streaming)

using namespace torchreplay;

// Without such stores nothing is copied by them.
boost::test_tools::assertion_result stores_are_there(boost::unit_test::test_unit_id) {
  return can_stream_into(kStreamedArrayBytes, kStreamedBytes);
}

BOOST_AUTO_TEST_CASE(a_value_is_copied_whole_and_nothing_beside_it_from_and_to_any_address,
                     *boost::unit_test::precondition(stores_are_there)) {
  constexpr uint64_t kBeside = 64;
  std::vector<char> from(kStreamedBytes + 3 * kBeside);
  for (size_t i = 0; i < from.size(); i++) from[i] = static_cast<char>(i * 131 % 127 + 1);
  for (uint64_t shift = 0; shift < kBeside; shift++)
    for (const uint64_t n : {uint64_t{0}, uint64_t{1}, kBeside - 1, kBeside, 2 * kBeside + 7, kStreamedBytes + shift}) {
      const char* source = from.data() + shift * 7 % kBeside;
      std::vector<char> to(n + 3 * kBeside, 0), expected = to;
      const auto at = static_cast<std::ptrdiff_t>(kBeside + shift);
      std::copy_n(source, n, expected.begin() + at);
      stream_value(to.data() + at, source, n);
      BOOST_REQUIRE(to == expected);
    }
}

BOOST_AUTO_TEST_CASE(short_values_and_small_arrays_stay_in_the_caches) {
  BOOST_TEST(!can_stream_into(kStreamedArrayBytes, kStreamedBytes - 1));
  BOOST_TEST(!can_stream_into(kStreamedArrayBytes - 1, kStreamedBytes));
}

BOOST_AUTO_TEST_SUITE_END()
