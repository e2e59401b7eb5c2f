// The inner loops of the priority tree, each one cache line wide: a portable version and its AVX-512 twin. Both compute
// the same integers, bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "simd.h"

namespace torchreplay::tree_node {

inline constexpr int kLeaves = 16;  // f32 leaves in a line
inline constexpr int kSums = 8;     // u64 exclusive prefix sums in a line: entry k is the sum of the children before k
inline constexpr int kRanks = 16;   // u32 ranks in a line

// Orders positive leaves from the largest down, with 0 for "no positive leaf": the negated bit pattern of a positive
// float grows as the float shrinks, and zero stays zero. So zero-filled memory is a valid, empty tree.
constexpr uint32_t rank_of(float leaf) { return -std::bit_cast<uint32_t>(leaf); }

// Grid units of a leaf. Adding 2^52 leaves the rounded integer in the low bits of the double; unlike a conversion to
// u64 this vectorises on every x86 and arm. `scale` is a power of two, so the product is exact, contracted to an fma or
// not.
constexpr uint64_t grid_units(float leaf, double scale) {
  return std::bit_cast<uint64_t>(static_cast<double>(leaf) * scale + 0x1p52) - 0x4330000000000000;
}

struct Portable {
  // Child that holds target `x` of a node; reduces x to a target within that child. Requires x < the node's sum.
  static int child(const uint64_t* sums, uint64_t& x) {
    int k = (sums[4] <= x) << 2;
    k += (sums[k + 2] <= x) << 1;
    k += sums[k + 1] <= x;
    x -= sums[k];
    return k;
  }

  // Leaf of a line that holds target `x`. Requires x < the line's sum.
  static int pick(const float* leaves, uint64_t x, double scale) {
    uint64_t sums[kLeaves], sum = 0;
    for (int j = 0; j < kLeaves; j++) sums[j] = grid_units(leaves[j], scale);
    for (uint64_t& s : sums) s = sum += s;
    int k = (sums[7] <= x) << 3;
    k += (sums[k + 3] <= x) << 2;
    k += (sums[k + 1] <= x) << 1;
    return k + (sums[k] <= x);
  }

  // Child k of a node grew by `delta` (modulo 2^64, so it may shrink).
  static void add(uint64_t* sums, int k, uint64_t delta) {
    for (int j = 0; j < kSums; j++) sums[j] += j > k ? delta : 0;
  }

  static uint32_t greatest(const uint32_t* ranks) {
    uint32_t top = 0;
    for (int j = 0; j < kRanks; j++) top = std::max(top, ranks[j]);
    return top;
  }

  static uint32_t greatest_of(const float* leaves) {
    uint32_t top = 0;
    for (int j = 0; j < kLeaves; j++) top = std::max(top, rank_of(leaves[j]));
    return top;
  }
};

#if defined(TORCHREPLAY_X86)
struct Avx512 {
  TORCHREPLAY_AVX512 static int child(const uint64_t* sums, uint64_t& x) {
    const __m512i target = _mm512_set1_epi64(static_cast<int64_t>(x));
    const int k = __builtin_popcount(_mm512_cmple_epu64_mask(_mm512_load_si512(sums), target)) - 1;
    x -= sums[k];
    return k;
  }

  TORCHREPLAY_AVX512 static int pick(const float* leaves, uint64_t x, double scale) {
    const __m512i target = _mm512_set1_epi64(static_cast<int64_t>(x));
    const __m512i low = inclusive_sums(grid_units_of(leaves, scale));
    const __m512i carry = _mm512_permutexvar_epi64(_mm512_set1_epi64(7), low);
    const __m512i high = _mm512_add_epi64(inclusive_sums(grid_units_of(leaves + 8, scale)), carry);
    return __builtin_popcount(_mm512_cmple_epu64_mask(low, target)) +
           __builtin_popcount(_mm512_cmple_epu64_mask(high, target));
  }

  TORCHREPLAY_AVX512 static void add(uint64_t* sums, int k, uint64_t delta) {
    const __m512i old = _mm512_load_si512(sums);
    const auto after = static_cast<__mmask8>(0xfe << k);
    _mm512_store_si512(sums, _mm512_mask_add_epi64(old, after, old, _mm512_set1_epi64(static_cast<int64_t>(delta))));
  }

  TORCHREPLAY_AVX512 static uint32_t greatest(const uint32_t* ranks) {
    return _mm512_reduce_max_epu32(_mm512_load_si512(ranks));
  }

  TORCHREPLAY_AVX512 static uint32_t greatest_of(const float* leaves) {
    return _mm512_reduce_max_epu32(_mm512_sub_epi32(_mm512_setzero_si512(), _mm512_load_si512(leaves)));
  }

 private:
  TORCHREPLAY_AVX512 static __m512i grid_units_of(const float* leaves, double scale) {
    const __m512d exact = _mm512_cvtps_pd(_mm256_load_ps(leaves));
    const __m512d shifted = _mm512_fmadd_pd(exact, _mm512_set1_pd(scale), _mm512_set1_pd(0x1p52));
    return _mm512_sub_epi64(_mm512_castpd_si512(shifted), _mm512_set1_epi64(0x4330000000000000));
  }

  TORCHREPLAY_AVX512 static __m512i inclusive_sums(__m512i s) {
    const __m512i zero = _mm512_setzero_si512();
    s = _mm512_add_epi64(s, _mm512_alignr_epi64(s, zero, 7));
    s = _mm512_add_epi64(s, _mm512_alignr_epi64(s, zero, 6));
    return _mm512_add_epi64(s, _mm512_alignr_epi64(s, zero, 4));
  }
};
#endif

}  // namespace torchreplay::tree_node
