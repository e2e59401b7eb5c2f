#include <boost/test/unit_test.hpp>
#include <set>
#include <vector>

#include "system/philox.h"

BOOST_AUTO_TEST_SUITE(test_random)

using torchreplay::Philox;
using torchreplay::philox_fill;
using torchreplay::Simd;

namespace {

std::vector<Simd> simds() {
  return torchreplay::has_avx512() ? std::vector{Simd::kPortable, Simd::kAvx512} : std::vector{Simd::kPortable};
}

std::vector<uint64_t> draw(uint64_t seed, uint64_t stream, uint64_t step, int n, Simd simd = Simd::kPortable) {
  std::vector<uint64_t> words(n);
  philox_fill(seed, stream, step, words.data(), n, simd);
  return words;
}

}  // namespace

// The known-answer vectors for "philox4x32 10" that are published with the Random123 library.
BOOST_AUTO_TEST_CASE(a_block_matches_the_published_known_answers) {
  struct {
    Philox::Counter counter;
    Philox::Key key;
    Philox::Counter answer;
  } const vectors[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const auto& v : vectors)
    BOOST_TEST(Philox::block(v.counter, v.key) == v.answer, boost::test_tools::per_element());
}

BOOST_AUTO_TEST_CASE(seed_stream_step_and_block_lie_where_the_documentation_says) {
  const uint64_t seed = 0x299f31d0a4093822, stream = 0x0370'13198a2e, step = 0x7344'85a308d3;
  for (Simd simd : simds()) {
    const auto words = draw(seed, stream, step, 40, simd);
    for (uint32_t block = 0; block < 20; block++) {
      const auto c = Philox::block({block, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0});
      BOOST_TEST(words[2 * block] == (c[0] | uint64_t{c[1]} << 32));
      BOOST_TEST(words[2 * block + 1] == (c[2] | uint64_t{c[3]} << 32));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_shorter_draw_is_a_prefix_of_a_longer_one_on_every_instruction_set) {
  const auto longest = draw(1, 2, 3, 100);
  for (Simd simd : simds()) {
    for (int n = 0; n <= 100; n++) {
      const auto words = draw(1, 2, 3, n, simd);
      BOOST_TEST(std::equal(words.begin(), words.end(), longest.begin()));
    }
  }
}

BOOST_AUTO_TEST_CASE(a_draw_writes_nothing_behind_its_words) {
  for (Simd simd : simds()) {
    for (int n = 0; n < 40; n++) {
      std::vector<uint64_t> words(n + 1, 42);
      philox_fill(1, 2, 3, words.data(), n, simd);
      BOOST_TEST(words.back() == 42u);
    }
  }
}

BOOST_AUTO_TEST_CASE(draws_of_distinct_seeds_streams_and_steps_share_no_word) {
  std::set<uint64_t> seen;
  size_t words = 0;
  const uint64_t places[] = {0, 1, 2, uint64_t{1} << 31, uint64_t{1} << 32, Philox::kLimit - 1};
  for (uint64_t seed : places) {
    for (uint64_t stream : places) {
      for (uint64_t step : places) {
        for (uint64_t word : draw(seed, stream, step, 16)) words += 1, seen.insert(word);
      }
    }
  }
  BOOST_TEST(seen.size() == words);  // a chance collision of 3456 words: 3e-13
}

BOOST_AUTO_TEST_CASE(every_bit_is_set_in_half_of_the_words) {
  const int n = 100'000;
  const auto words = draw(7, 8, 9, n, simds().back());
  for (int bit = 0; bit < 64; bit++) {
    int64_t ones = 0;
    for (uint64_t word : words) ones += word >> bit & 1;
    BOOST_TEST(std::abs(ones - n / 2) <
               6 * 159);  // six standard deviations of 158.1; over 64 bits a false alarm of 1e-7
  }
}

BOOST_AUTO_TEST_SUITE_END()
