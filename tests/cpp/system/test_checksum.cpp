#include <boost/test/unit_test.hpp>
#include <random>
#include <string>
#include <vector>

#include "system/checksum.h"

BOOST_AUTO_TEST_SUITE(test_checksum)

using namespace torchreplay;

namespace {

// By the definition: the remainder of a division of polynomials, bit by bit.
uint32_t by_division(const std::vector<unsigned char>& bytes) {
  uint32_t r = ~0U;
  for (unsigned char byte : bytes)
    for (int bit = 0; bit < 8; bit++) r = (r >> 1) ^ (((r ^ byte >> bit) & 1) != 0 ? 0x82f63b78U : 0U);
  return ~r;
}

std::vector<unsigned char> some_bytes(size_t n) {
  std::mt19937 random(static_cast<unsigned>(n));
  std::vector<unsigned char> bytes(n);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

}  // namespace

BOOST_AUTO_TEST_CASE(published_values_come_out) {
  const std::string digits = "123456789";  // the check value of CRC-32C
  BOOST_TEST(checksum(digits.data(), digits.size()) == 0xe3069283U);
  const std::vector<unsigned char> zeros(32), ones(32, 0xff);  // RFC 3720, appendix B.4
  BOOST_TEST(checksum(zeros.data(), 32) == 0x8a9136aaU);
  BOOST_TEST(checksum(ones.data(), 32) == 0x62a8ab43U);
}

BOOST_AUTO_TEST_CASE(all_lengths_and_pieces_and_both_twins_agree_with_the_definition) {
  for (size_t n = 0; n < 70; n++) {
    const auto bytes = some_bytes(n);
    const uint32_t expected = by_division(bytes);
    BOOST_TEST(checksum(bytes.data(), n) == expected);
    BOOST_TEST(~crc32c::portable(~0U, bytes.data(), n) == expected);
    for (size_t cut = 0; cut <= n; cut++)
      BOOST_TEST(checksum(bytes.data() + cut, n - cut, checksum(bytes.data(), cut)) == expected);
  }
}

BOOST_AUTO_TEST_SUITE_END()
