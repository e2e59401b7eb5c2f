// Philox4x32-10, a counter-based random generator: random words as a pure function of (seed, stream, step).
// Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3. SC'11.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "system/simd.h"

namespace torchreplay {

struct Philox {
  using Counter = std::array<uint32_t, 4>;
  using Key = std::array<uint32_t, 2>;

  // Streams and steps lie below this bound, so that they fit the counter side by side.
  static constexpr uint64_t kLimit = uint64_t{1} << 48;
  static constexpr int kRounds = 10;
  // The multipliers and Weyl increments of the paper, section 4.3 and table 2.
  static constexpr uint32_t kMultiply0 = 0xD2511F53, kMultiply1 = 0xCD9E8D57;
  static constexpr uint32_t kBump0 = 0x9E3779B9, kBump1 = 0xBB67AE85;

  // The bijection itself: one block of four 32-bit words.
  static constexpr Counter block(Counter c, Key k) {
    for (int round = 0; round < kRounds; round++) {
      const uint64_t p0 = uint64_t{kMultiply0} * c[0], p1 = uint64_t{kMultiply1} * c[2];
      c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
           static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
      k = {k[0] + kBump0, k[1] + kBump1};
    }
    return c;
  }

  static constexpr Key key(uint64_t seed) { return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}; }

  // Counter of the first block of a draw; block b of the draw adds b to word 0.
  static constexpr Counter counter(uint64_t stream, uint64_t step) {
    const uint64_t high = (step >> 32 & 0xffff) | (stream >> 32 & 0xffff) << 16;
    return {0, static_cast<uint32_t>(step), static_cast<uint32_t>(stream), static_cast<uint32_t>(high)};
  }
};

namespace philox_kernel {

inline void portable(Philox::Counter first, Philox::Key key, uint32_t begin, uint64_t* out, int n) {
  for (int i = 0; i < n; i += 2) {
    first[0] = begin + static_cast<uint32_t>(i) / 2;
    const Philox::Counter c = Philox::block(first, key);
    out[i] = c[0] | uint64_t{c[1]} << 32;
    if (i + 1 < n) out[i + 1] = c[2] | uint64_t{c[3]} << 32;
  }
}

#if defined(TORCHREPLAY_X86)
// Eight blocks at a time, one 32-bit word in each 64-bit lane. The upper halves of the lanes are left to hold rubbish:
// the multiplication reads the lower halves only, and shifts bring in the products' upper halves clean.
TORCHREPLAY_AVX512 inline void avx512(Philox::Counter first, Philox::Key key, uint64_t* out, int n) {
  const __m512i m0 = _mm512_set1_epi64(Philox::kMultiply0), m1 = _mm512_set1_epi64(Philox::kMultiply1);
  const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), low = _mm512_set1_epi64(0xffffffff);
  const __m512i zip_low = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i zip_high = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  const int whole = n - n % 16;
  for (int i = 0; i < whole; i += 16) {
    __m512i c0 = _mm512_add_epi64(_mm512_set1_epi64(i / 2), lanes), c1 = _mm512_set1_epi64(first[1]);
    __m512i c2 = _mm512_set1_epi64(first[2]), c3 = _mm512_set1_epi64(first[3]);
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < Philox::kRounds; round++, k0 += Philox::kBump0, k1 += Philox::kBump1) {
      const __m512i p0 = _mm512_mul_epu32(c0, m0), p1 = _mm512_mul_epu32(c2, m1);
      c0 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p1, 32), c1), _mm512_set1_epi64(k0));
      c2 = _mm512_xor_si512(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), c3), _mm512_set1_epi64(k1));
      c1 = p1;
      c3 = p0;
    }
    const __m512i even = _mm512_or_si512(_mm512_and_si512(c0, low), _mm512_slli_epi64(c1, 32));
    const __m512i odd = _mm512_or_si512(_mm512_and_si512(c2, low), _mm512_slli_epi64(c3, 32));
    _mm512_storeu_si512(out + i, _mm512_permutex2var_epi64(even, zip_low, odd));
    _mm512_storeu_si512(out + i + 8, _mm512_permutex2var_epi64(even, zip_high, odd));
  }
  portable(first, key, static_cast<uint32_t>(whole) / 2, out + whole, n - whole);
}
#endif

}  // namespace philox_kernel

// Fills `out` with the `n` 64-bit words of draw number `step` of `stream`. O(n), about 1 ns a word with AVX-512.
//
// Key: the seed, lower half first. 128-bit counter, lowest word first: the number of the block within the draw (two
// words a block, so n < 2^31 cannot overflow it), step bits 0-31, stream bits 0-31, step bits 32-47 below stream bits
// 32-47. Distinct (stream, step) below Philox::kLimit therefore never share a block. A shorter draw is a prefix of a
// longer one.
inline void philox_fill(uint64_t seed, uint64_t stream, uint64_t step, uint64_t* out, int n, Simd simd = best_simd()) {
  const Philox::Counter first = Philox::counter(stream, step);
  const Philox::Key key = Philox::key(seed);
#if defined(TORCHREPLAY_X86)
  if (simd == Simd::kAvx512) return philox_kernel::avx512(first, key, out, n);
#endif
  static_cast<void>(simd);
  philox_kernel::portable(first, key, 0, out, n);
}

}  // namespace torchreplay
