// The inner loops of the priority tree, each one cache line wide: a portable version and its AVX-512 twin. Both compute
// the same integers, bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "simd.h"

namespace torchreplay::tree_node {

inline constexpr int kLeaves = 16;  // f32 leaves in a line
inline constexpr int kSums = 8;     // u64 exclusive prefix sums in a line: entry k is the sum of the children before k
inline constexpr int kRanks = 16;   // u32 ranks in a line

// A block is what lies under one bottom node of sums, and under one rank: 128 leaves. The smallest of so many changes
// rarely, and the ranks stay in the inner caches. (A rank for each line of leaves doubled the time of `set` at 10^7.)
inline constexpr int kBlockLines = kSums;
inline constexpr int kBlockLeaves = kBlockLines * kLeaves;

// Orders positive leaves from the largest down, with 0 for "no positive leaf": the negated bit pattern of a positive
// float grows as the float shrinks, and zero stays zero. So zero-filled memory is a valid, empty tree.
constexpr uint32_t rank_of(float leaf) { return -std::bit_cast<uint32_t>(leaf); }
constexpr float leaf_of(uint32_t rank) { return std::bit_cast<float>(-rank); }

// The fixed-point grid on which leaves are summed.
struct Grid {
  static constexpr float kMax = 8192.0f - 0x1p-11f;  // the grid's range is 2^13; this is one ulp less

  double scale;  // grid steps in 1.0: a power of two
  float step;

  // capacity * 2^bits < 2^63 keeps the total of all leaves in range; 51 bits is what `units` can hold.
  explicit Grid(int64_t capacity) {
    const int bits = std::min(51, 62 - static_cast<int>(std::bit_width(static_cast<uint64_t>(capacity - 1))));
    scale = std::ldexp(1.0, bits - 13);
    step = static_cast<float>(1 / scale);
  }

  float clamp(float p) const { return p > 0 ? std::min(std::max(p, step), kMax) : 0.0f; }

  // Grid units of a leaf. Adding 2^52 leaves the rounded integer in the low bits of the double; unlike a conversion to
  // u64 this vectorises on every x86 and arm. The product is exact, so it does not matter whether the sum is fused with
  // it.
  uint64_t units(float leaf) const {
    return std::bit_cast<uint64_t>(static_cast<double>(leaf) * scale + 0x1p52) - 0x4330000000000000;
  }
};

// kAfter.mask[k][j] has all bits set where j > k. (SSE2 cannot compare 64-bit integers.)
struct AfterMask {
  uint64_t mask[kSums][kSums] = {};
  constexpr AfterMask() {
    for (int k = 0; k < kSums; k++) {
      for (int j = k + 1; j < kSums; j++) mask[k][j] = ~uint64_t{0};
    }
  }
};
alignas(64) inline constexpr AfterMask kAfter;

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
  static int pick(const float* leaves, uint64_t x, const Grid& grid) {
    uint64_t sums[kLeaves], sum = 0;
    for (int j = 0; j < kLeaves; j++) sums[j] = grid.units(leaves[j]);
    for (uint64_t& s : sums) s = sum += s;
    int k = (sums[7] <= x) << 3;
    k += (sums[k + 3] <= x) << 2;
    k += (sums[k + 1] <= x) << 1;
    return k + (sums[k] <= x);
  }

  // Child k of a node grew by `delta` (modulo 2^64, so it may shrink).
  static void add(uint64_t* sums, int k, uint64_t delta) {
    for (int j = 0; j < kSums; j++) sums[j] += kAfter.mask[k][j] & delta;
  }

  static uint32_t greatest(const uint32_t* ranks) {
    uint32_t top = 0;
    for (int j = 0; j < kRanks; j++) top = std::max(top, ranks[j]);
    return top;
  }

  static uint32_t greatest_of(const float* block) {
    uint32_t top = 0;
    for (int j = 0; j < kBlockLeaves; j++) top = std::max(top, rank_of(block[j]));
    return top;
  }

  // Clamps a line of leaves, adds the number of positive ones to `count` and returns their sum.
  static uint64_t restore(float* leaves, const Grid& grid, int64_t& count) {
    uint64_t sum = 0;
    for (int j = 0; j < kLeaves; j++) {
      leaves[j] = grid.clamp(leaves[j]);
      count += leaves[j] > 0;
      sum += grid.units(leaves[j]);
    }
    return sum;
  }
};

#if defined(TORCHREPLAY_X86)
struct Avx512 {
  TORCHREPLAY_AVX512 static int child(const uint64_t* sums, uint64_t& x) {
    const __m512i target = _mm512_set1_epi64(static_cast<int64_t>(x));
    const int k = __builtin_popcount(_mm512_mask_cmple_epu64_mask(0xfe, _mm512_load_si512(sums), target));
    x -= sums[k];
    return k;
  }

  TORCHREPLAY_AVX512 static int pick(const float* leaves, uint64_t x, const Grid& grid) {
    const __m512i target = _mm512_set1_epi64(static_cast<int64_t>(x));
    const __m512i low = inclusive_sums(units_of(leaves, grid));
    const __m512i carry = _mm512_permutexvar_epi64(_mm512_set1_epi64(7), low);
    const __m512i high = _mm512_add_epi64(inclusive_sums(units_of(leaves + 8, grid)), carry);
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

  TORCHREPLAY_AVX512 static uint32_t greatest_of(const float* block) {
    __m512i top = _mm512_setzero_si512();
    for (int j = 0; j < kBlockLeaves; j += kLeaves) {
      const __m512i leaves = _mm512_load_si512(block + j);
      top = _mm512_max_epu32(top, _mm512_sub_epi32(_mm512_setzero_si512(), leaves));
    }
    return _mm512_reduce_max_epu32(top);
  }

  TORCHREPLAY_AVX512 static uint64_t restore(float* leaves, const Grid& grid, int64_t& count) {
    const __m512 given = _mm512_load_ps(leaves);
    const __mmask16 positive = _mm512_cmp_ps_mask(given, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512 at_least = _mm512_max_ps(given, _mm512_set1_ps(grid.step));
    _mm512_store_ps(leaves, _mm512_maskz_min_ps(positive, at_least, _mm512_set1_ps(Grid::kMax)));
    count += __builtin_popcount(positive);
    const __m512i sums = _mm512_add_epi64(units_of(leaves, grid), units_of(leaves + 8, grid));
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(sums));
  }

 private:
  TORCHREPLAY_AVX512 static __m512i units_of(const float* leaves, const Grid& grid) {
    const __m512d exact = _mm512_cvtps_pd(_mm256_load_ps(leaves));
    const __m512d shifted = _mm512_fmadd_pd(exact, _mm512_set1_pd(grid.scale), _mm512_set1_pd(0x1p52));
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
