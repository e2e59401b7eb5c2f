#include <boost/test/unit_test.hpp>
#include <random>
#include <vector>

#include "system/divisor.h"

BOOST_AUTO_TEST_SUITE(test_divisor)

using namespace torchreplay;

namespace {

constexpr uint64_t kMost = ~uint64_t{0};

// Where rounding errs if it errs: around powers of two and multiples, and at both ends.
std::vector<uint64_t> numbers_around(uint64_t n) {
  std::vector<uint64_t> numbers = {0, 1, 2, kMost - 1, kMost};
  const uint64_t multiples[] = {n, n * (kMost / n), n * (kMost / n / 2), n * (kMost / n / 3 + 1)};
  for (uint64_t multiple : multiples)
    for (uint64_t off : {uint64_t{0}, uint64_t{1}, kMost}) numbers.push_back(multiple + off);
  for (int bit = 0; bit < 64; bit++)
    for (uint64_t off : {uint64_t{0}, uint64_t{1}, kMost}) numbers.push_back((uint64_t{1} << bit) + off);
  return numbers;
}

void check(uint64_t n, uint64_t x) {
  const auto [quotient, rest] = Divisor(n).divide(x);
  if (quotient != x / n || rest != x % n) BOOST_FAIL(x << " / " << n << " gave " << quotient << ", rest " << rest);
}

}  // namespace

BOOST_AUTO_TEST_CASE(it_divides_as_the_processor_does) {
  std::mt19937_64 random(1);
  std::vector<uint64_t> divisors = numbers_around(1'000'000);
  for (int k = 0; k < 2000; k++) divisors.push_back(random() >> random() % 64);
  for (uint64_t n : divisors) {
    if (n == 0) continue;
    for (uint64_t x : numbers_around(n)) check(n, x);
    for (int k = 0; k < 200; k++) check(n, random() >> random() % 64);
  }
}

BOOST_AUTO_TEST_SUITE_END()
