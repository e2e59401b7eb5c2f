// Powers against the C library's in extended precision.
#include <boost/test/unit_test.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "system/power.h"

BOOST_AUTO_TEST_SUITE(test_power)

using namespace torchreplay;

namespace {

constexpr float kExponents[] = {0.0f, 0.01f, 0.4f, 0.5f, 0.6f, 0.9999f, 1.0f, 2.0f, 3.7f, 30.0f};

// Of all magnitudes, subnormal numbers and both ends too.
std::vector<float> bases() {
  std::vector<float> x = {0, 1, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(),
                          std::numeric_limits<float>::max()};
  std::mt19937 random(1);
  while (x.size() < 20'001) x.push_back(std::bit_cast<float>(static_cast<uint32_t>(random() % 0x7f800000)));
  return x;
}

int64_t ulps(float a, float b) { return std::abs(int64_t{std::bit_cast<int32_t>(a)} - std::bit_cast<int32_t>(b)); }

std::vector<float> powers(std::vector<float> x, float y, Simd simd) {
  power(x.data(), static_cast<int64_t>(x.size()), y, simd);
  return x;
}

boost::test_tools::assertion_result avx512_is_there(boost::unit_test::test_unit_id) {
  boost::test_tools::assertion_result there(has_avx512());
  there.message() << "this processor has one instruction set only that powers are computed by";
  return there;
}

}  // namespace

BOOST_AUTO_TEST_CASE(powers_are_the_nearest_floats_or_rarely_those_beside_them) {
  const std::vector<float> x = bases();
  size_t beside = 0;
  for (float y : kExponents) {
    const std::vector<float> got = powers(x, y, Simd::kPortable);
    for (size_t i = 0; i < x.size(); i++) {
      const auto expected = static_cast<float>(std::pow(static_cast<long double>(x[i]), static_cast<long double>(y)));
      BOOST_REQUIRE_LE(ulps(got[i], expected), 1);
      beside += got[i] != expected;
    }
  }
  BOOST_TEST(beside <= x.size() * std::size(kExponents) / 10'000);
}

BOOST_AUTO_TEST_CASE(powers_have_the_same_bits_on_every_processor, *boost::unit_test::precondition(avx512_is_there)) {
  const std::vector<float> x = bases();
  for (float y : kExponents) BOOST_TEST(powers(x, y, Simd::kPortable) == powers(x, y, Simd::kAvx512));
}

BOOST_AUTO_TEST_CASE(a_power_does_not_depend_on_its_neighbours) {
  const std::vector<float> x = bases(), all = powers(x, 0.6f, best_simd());
  for (size_t i = 0; i < 1'000; i++) BOOST_TEST(powers({x[i]}, 0.6f, best_simd())[0] == all[i]);
}

// (|td| + eps)^alpha of TD errors of 1e-12 and of 1e12, and of what a double holds but no float does.
BOOST_AUTO_TEST_CASE(powers_of_doubles_are_the_nearest_floats_or_rarely_those_beside_them) {
  std::vector<double> x = {0, 1, std::numeric_limits<double>::min(), 1e-50, 1e-12, 1e12, 1e50};
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> decade(-50, 50);
  while (x.size() < 20'000) x.push_back(std::pow(10, decade(random)));
  size_t beside = 0;
  for (double y : {0.0, 0.4, 0.6, 0.7, 1.0, 2.0}) {
    std::vector<float> got(x.size());
    power(x.data(), static_cast<int64_t>(x.size()), y, got.data(), Simd::kPortable);
    for (size_t i = 0; i < x.size(); i++) {
      const auto expected = static_cast<float>(std::pow(static_cast<long double>(x[i]), static_cast<long double>(y)));
      BOOST_REQUIRE_LE(ulps(got[i], expected), 1);
      beside += got[i] != expected;
    }
    std::vector<float> same(x.size());
    power(x.data(), static_cast<int64_t>(x.size()), y, same.data());
    BOOST_TEST(same == got);
  }
  BOOST_TEST(beside <= x.size() * 6 / 10'000);
}

BOOST_AUTO_TEST_SUITE_END()
