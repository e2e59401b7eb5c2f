#include <bit>
#include <boost/test/unit_test.hpp>
#include <random>
#include <vector>

#include "segment/element.h"

BOOST_AUTO_TEST_SUITE(test_element)

using namespace torchreplay;

namespace {

// A bfloat16 is the upper half of a float.
double bfloat16_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Nearest bfloat16, ties to even: the two neighbours of |value| are compared in long double, which holds both
// distances exactly (the reference does not depend on how the implementation rounds).
uint16_t nearest_bfloat16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double a = std::fabs(value);
  uint16_t low = 0, high = 0x7f80;  // the largest pattern <= a, and the one above it
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (bfloat16_value(middle) <= a ? low : high) = middle;
  }
  // Infinity stands for 2^128, the value after the largest.
  const long double above = high == 0x7f80 ? 0x1p128L : bfloat16_value(high);
  const long double to_low = static_cast<long double>(a) - bfloat16_value(low), to_high = above - a;
  return sign | (to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high);
}

// Doubles that meet every case: all exponents, ties of both formats and their neighbours, overflow, subnormals.
std::vector<double> telling_doubles() {
  std::mt19937_64 random(1);
  std::vector<double> v = {0, 65504, 65519.99, 65520, 65536, 0x1p-24, 0x1p-25, 0x1.8p-25, 0x1p-26, 1e300, 5e-324};
  for (int k = 0; k < 200'000; k++) {
    const int exponent = static_cast<int>(random() % 320) - 160;
    const uint64_t significand = (1 << 12) + random() % (1 << 12);  // a few bits: ties are frequent
    const double value = std::ldexp(static_cast<double>(significand), exponent);
    v.push_back(value);
    v.push_back(std::nextafter(value, 0));
    v.push_back(std::nextafter(value, 1e308));
  }
  const size_t n = v.size();
  for (size_t i = 0; i < n; i++) v.push_back(-v[i]);
  return v;
}

template <class T>
char* bytes(T& v) {
  return reinterpret_cast<char*>(&v);
}

// Converts one value through the run-time types.
template <class To, class From>
To converted(Element to, Element from, From value) {
  StridedArray a;
  a.element = from;
  a.data = bytes(value);
  To result;
  copy_converted(bytes(result), to, a.data, a, 0);
  return result;
}

template <class From>
bool fits(Element to, Element from, From value) {
  StridedArray a;
  a.element = from;
  a.data = bytes(value);
  Unfit unfit;
  return !find_unfit(a, to, unfit);
}

}  // namespace

#if defined(__aarch64__) || defined(__FLT16_MANT_DIG__)
#ifdef __aarch64__
using CompilersHalf = __fp16;
#else
using CompilersHalf = _Float16;
#endif

BOOST_AUTO_TEST_CASE(every_half_has_the_value_the_compiler_gives_it) {
  for (int bits = 0; bits < 65536; bits++) {
    Half h;
    h.bits = static_cast<uint16_t>(bits);
    const auto expected = static_cast<double>(std::bit_cast<CompilersHalf>(h.bits));
    const auto value = static_cast<double>(h);
    if (std::isnan(expected) ? !std::isnan(value) : std::bit_cast<uint64_t>(value) != std::bit_cast<uint64_t>(expected))
      BOOST_FAIL("half " << bits << " is " << value << ", expected " << expected);
  }
}

BOOST_AUTO_TEST_CASE(doubles_round_to_half_as_the_compiler_rounds_them) {
  for (double value : telling_doubles()) {
    const auto expected = std::bit_cast<uint16_t>(static_cast<CompilersHalf>(value));
    if (Half(value).bits != expected) BOOST_FAIL(value << " became " << Half(value).bits << ", expected " << expected);
  }
}
#endif

BOOST_AUTO_TEST_CASE(every_bfloat16_is_the_upper_half_of_a_float) {
  for (int bits = 0; bits < 65536; bits++) {
    BFloat16 b;
    b.bits = static_cast<uint16_t>(bits);
    const double expected = bfloat16_value(b.bits);
    const auto value = static_cast<double>(b);
    if (std::isnan(expected) ? !std::isnan(value) : std::bit_cast<uint64_t>(value) != std::bit_cast<uint64_t>(expected))
      BOOST_FAIL("bfloat16 " << bits << " is " << value << ", expected " << expected);
  }
}

BOOST_AUTO_TEST_CASE(doubles_round_to_the_nearest_bfloat16_ties_to_even) {
  for (double value : telling_doubles()) {
    const uint16_t expected = nearest_bfloat16(value);
    if (BFloat16(value).bits != expected)
      BOOST_FAIL(value << " became " << BFloat16(value).bits << ", expected " << expected);
  }
}

BOOST_AUTO_TEST_CASE(every_16_bit_float_survives_the_way_through_double) {
  for (int bits = 0; bits < 65536; bits++) {
    Half h;
    BFloat16 b;
    h.bits = b.bits = static_cast<uint16_t>(bits);
    const double half = static_cast<double>(h), bfloat = static_cast<double>(b);
    if (!std::isnan(half) && Half(half).bits != bits) BOOST_FAIL("half " << bits);
    if (!std::isnan(bfloat) && BFloat16(bfloat).bits != bits) BOOST_FAIL("bfloat16 " << bits);
    if (std::isnan(half)) BOOST_TEST(std::isnan(static_cast<double>(Half(half))));
    if (std::isnan(bfloat)) BOOST_TEST(std::isnan(static_cast<double>(BFloat16(bfloat))));
  }
}

BOOST_AUTO_TEST_CASE(infinities_and_signed_zeros_are_kept) {
  const double infinity = std::numeric_limits<double>::infinity();
  BOOST_TEST(Half(infinity).bits == 0x7c00);
  BOOST_TEST(Half(-infinity).bits == 0xfc00);
  BOOST_TEST(BFloat16(infinity).bits == 0x7f80);
  BOOST_TEST(Half(-0.0).bits == 0x8000);
  BOOST_TEST(BFloat16(-0.0).bits == 0x8000);
}

BOOST_AUTO_TEST_CASE(casts_follow_the_same_kind_rule_of_numpy) {
  // Rows: from. Columns: to. b: bool, u: unsigned, i: signed, f: floating, as numpy.can_cast(..., "same_kind") answers.
  const bool allowed[4][4] = {{true, true, true, true},      // bool to everything
                              {false, true, true, true},     // unsigned
                              {false, false, true, true},    // signed
                              {false, false, false, true}};  // floating
  const int kind[kElements] = {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
  for (int from = 0; from < kElements; from++)
    for (int to = 0; to < kElements; to++)
      BOOST_TEST(casts(static_cast<Element>(from), static_cast<Element>(to)) == allowed[kind[from]][kind[to]]);
}

BOOST_AUTO_TEST_CASE(sizes_are_those_of_the_types) {
  const int sizes[kElements] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};
  for (int e = 0; e < kElements; e++) BOOST_TEST(item_size(static_cast<Element>(e)) == sizes[e]);
}

BOOST_AUTO_TEST_CASE(numbers_keep_their_value_where_the_target_can_hold_it) {
  BOOST_TEST((converted<float>(Element::kF32, Element::kF64, 0.1)) == 0.1F);
  BOOST_TEST((converted<double>(Element::kF64, Element::kF32, 0.1F)) == static_cast<double>(0.1F));
  BOOST_TEST((converted<int64_t>(Element::kI64, Element::kI8, int8_t{-5})) == -5);
  BOOST_TEST((converted<float>(Element::kF32, Element::kU64, ~uint64_t{0})) == 0x1p64F);
  BOOST_TEST((converted<double>(Element::kF64, Element::kBool, uint8_t{1})) == 1.0);
  BOOST_TEST((converted<uint16_t>(Element::kU16, Element::kU8, uint8_t{200})) == 200);
  BOOST_TEST((converted<Half>(Element::kF16, Element::kI32, -3)).bits == 0xc200);
  BOOST_TEST((converted<BFloat16>(Element::kBF16, Element::kF32, 1.0F)).bits == 0x3f80);
}

BOOST_AUTO_TEST_CASE(integers_too_wide_for_the_target_keep_their_low_bits) {
  BOOST_TEST((converted<int8_t>(Element::kI8, Element::kI64, int64_t{0x1234})) == 0x34);
  BOOST_TEST((converted<uint8_t>(Element::kU8, Element::kU32, uint32_t{0x1ff})) == 0xff);
  BOOST_TEST((converted<int32_t>(Element::kI32, Element::kU64, ~uint64_t{0})) == -1);
}

// Boost hears of failures alone: to hear of a check takes it microseconds, and there are half a million.
template <class Value>
void fits_unless_only_the_source_is_finite(Element to, Element from, Value value, double converted) {
  const bool expected = !std::isfinite(static_cast<double>(value)) || std::isfinite(converted);
  if (fits(to, from, value) != expected)
    BOOST_FAIL(static_cast<double>(value) << (expected ? " fits" : " does not fit"));
}

BOOST_AUTO_TEST_CASE(a_float_does_not_fit_where_it_is_finite_and_its_conversion_is_not) {
  std::vector<double> values = telling_doubles();
  const double infinity = std::numeric_limits<double>::infinity();
  values.insert(values.end(), {infinity, -infinity, std::numeric_limits<double>::quiet_NaN(), 0x1.ffffffp127,
                               std::nextafter(0x1.ffffffp127, 0), 0x1.ffp127, 0x1.ffffp127});
  const auto check = fits_unless_only_the_source_is_finite<double>;
  const auto check_single = fits_unless_only_the_source_is_finite<float>;
  for (double value : values) {
    const auto single = static_cast<float>(value);
    check(Element::kF16, Element::kF64, value, static_cast<double>(Half(value)));
    check(Element::kBF16, Element::kF64, value, static_cast<double>(BFloat16(value)));
    check(Element::kF32, Element::kF64, value, single);
    check(Element::kF64, Element::kF64, value, value);
    check_single(Element::kF16, Element::kF32, single, static_cast<double>(Half(single)));
    check_single(Element::kBF16, Element::kF32, single, static_cast<double>(BFloat16(single)));
    check_single(Element::kF64, Element::kF32, single, single);
  }
  for (int bits = 0; bits < 65536; bits++) {
    BFloat16 wide;
    wide.bits = static_cast<uint16_t>(bits);
    fits_unless_only_the_source_is_finite(Element::kF16, Element::kBF16, wide,
                                          static_cast<double>(Half(static_cast<double>(wide))));
  }
}

// The bounds of every integer type, and their neighbours.
std::vector<__int128> telling_integers() {
  std::vector<__int128> v = {0, 65519, 65520, -65519, -65520};
  for (int bits : {7, 8, 15, 16, 31, 32, 63, 64})
    for (int near = -1; near <= 1; near++) {
      v.push_back((__int128{1} << bits) + near);
      v.push_back(-(__int128{1} << bits) + near);
    }
  return v;
}

template <class From>
void integers_fit_where_the_target_keeps_them(Element from) {
  const Element targets[] = {Element::kU8,  Element::kU16, Element::kU32, Element::kU64,  Element::kI8,  Element::kI16,
                             Element::kI32, Element::kI64, Element::kF16, Element::kBF16, Element::kF32, Element::kF64};
  for (__int128 value : telling_integers()) {
    if (value < std::numeric_limits<From>::min() || value > std::numeric_limits<From>::max()) continue;
    for (Element to : targets) {
      if (!casts(from, to)) continue;
      const int bits = 8 * item_size(to);
      const bool is_signed = kind_rank(to) == 2;
      const __int128 low = is_signed ? -(__int128{1} << (bits - 1)) : 0,
                     high = (__int128{1} << (is_signed ? bits - 1 : bits)) - 1;
      // Of the floating types only float16 ends before the integers do, and 65,520 is the first that it rounds up.
      const bool expected = kind_rank(to) < 3     ? value >= low && value <= high
                            : to == Element::kF16 ? value > -65520 && value < 65520
                                                  : true;
      BOOST_TEST_REQUIRE(fits(to, from, static_cast<From>(value)) == expected);
    }
  }
}

BOOST_AUTO_TEST_CASE(an_integer_does_not_fit_where_the_target_would_make_another_of_it) {
  integers_fit_where_the_target_keeps_them<uint8_t>(Element::kU8);
  integers_fit_where_the_target_keeps_them<uint16_t>(Element::kU16);
  integers_fit_where_the_target_keeps_them<uint32_t>(Element::kU32);
  integers_fit_where_the_target_keeps_them<uint64_t>(Element::kU64);
  integers_fit_where_the_target_keeps_them<int8_t>(Element::kI8);
  integers_fit_where_the_target_keeps_them<int16_t>(Element::kI16);
  integers_fit_where_the_target_keeps_them<int32_t>(Element::kI32);
  integers_fit_where_the_target_keeps_them<int64_t>(Element::kI64);
}

BOOST_AUTO_TEST_CASE(the_first_value_that_does_not_fit_is_named_with_its_index) {
  std::vector<double> memory(24);
  memory[17] = -1e300;  // at (1, 1, 1) of 2 x 3 x 4
  memory[18] = 2e300;
  StridedArray a;
  a.element = Element::kF64;
  a.data = bytes(memory[0]);
  a.dims = 3;
  a.shape[0] = 2, a.shape[1] = 3, a.shape[2] = 4;
  a.stride[0] = 96, a.stride[1] = 32, a.stride[2] = 8;
  const auto expect = [&](std::vector<int64_t> index, const char* value) {
    Unfit unfit;
    BOOST_TEST_REQUIRE(find_unfit(a, Element::kF32, unfit));
    BOOST_TEST(unfit.value == value);
    BOOST_TEST(std::vector<int64_t>(unfit.index, unfit.index + a.dims) == index, boost::test_tools::per_element());
  };
  expect({1, 1, 1}, "-1e+300");
  a.data = bytes(memory[23]);  // from the end
  for (int d = 0; d < 3; d++) a.stride[d] = -a.stride[d];
  expect({0, 1, 1}, "2e+300");
  a.data = bytes(memory[17]);  // one row, repeated so often that nobody could look at each
  a.shape[0] = int64_t{1} << 60;
  a.stride[0] = 0;
  a.shape[1] = 1, a.shape[2] = 2;
  a.stride[1] = 32, a.stride[2] = 8;
  expect({0, 0, 0}, "-1e+300");
  a.shape[0] = 0;
  Unfit unfit;
  BOOST_TEST(!find_unfit(a, Element::kF32, unfit));
}

BOOST_AUTO_TEST_CASE(arrays_of_any_strides_are_copied_in_row_major_order) {
  std::mt19937_64 random(2);
  for (int k = 0; k < 500; k++) {
    std::vector<int16_t> memory(4096);
    for (auto& v : memory) v = static_cast<int16_t>(random());
    StridedArray a;
    a.element = Element::kI16;
    a.dims = static_cast<int>(random() % 5);
    const int64_t centre = 2048;
    a.data = reinterpret_cast<const char*>(memory.data() + centre);
    int64_t n = 1;
    for (int d = 0; d < a.dims; d++) {
      a.shape[d] = static_cast<int64_t>(random() % 5);
      a.stride[d] =
          2 * (static_cast<int64_t>(random() % 200) - 100);  // negative, zero (broadcast) and overlapping ones
      n *= a.shape[d];
    }
    std::vector<double> copied(static_cast<size_t>(n) + 1, -1e9);
    copy_converted(bytes(copied[0]), Element::kF64, a.data, a, 0);
    bool right = copied[n] == -1e9;  // nothing beyond the end
    for (int64_t i = 0; i < n; i++) {
      int64_t at = 0, rest = i;
      for (int d = a.dims - 1; d >= 0; d--) {
        at += rest % a.shape[d] * a.stride[d] / 2;
        rest /= a.shape[d];
      }
      right &= copied[i] == memory[centre + at];
    }
    BOOST_TEST(right);
  }
}

BOOST_AUTO_TEST_CASE(leading_dimensions_can_be_taken_row_by_row) {
  const float values[2][3] = {{1, 2, 3}, {4, 5, 6}};
  StridedArray a;
  a.element = Element::kF32;
  a.dims = 2;
  a.shape[0] = 2, a.shape[1] = 3;
  a.stride[0] = 12, a.stride[1] = 4;
  a.data = reinterpret_cast<const char*>(values);
  float row[3];
  copy_converted(bytes(row), Element::kF32, a.data + a.stride[0], a, 1);
  BOOST_TEST(row == (std::vector<float>{4, 5, 6}), boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(only_contiguous_arrays_are_dense) {
  StridedArray a;
  a.element = Element::kF32;
  a.dims = 2;
  a.shape[0] = 5, a.shape[1] = 3;
  a.stride[0] = 12, a.stride[1] = 4;
  BOOST_TEST(is_dense(a, 0));
  a.stride[0] = 16;
  BOOST_TEST(!is_dense(a, 0));
  BOOST_TEST(is_dense(a, 1));  // each row still is
  a.stride[1] = -4;
  BOOST_TEST(!is_dense(a, 1));
  a.shape[1] = 1;  // the stride of a dimension of one does not matter
  BOOST_TEST(is_dense(a, 1));
}

BOOST_AUTO_TEST_SUITE_END()
