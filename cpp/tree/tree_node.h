// The inner loops of the priority tree, each one cache line wide: a portable version and its AVX-512 twin. Both compute
// the same integers, bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "system/simd.h"

namespace torchreplay::tree_node {

inline constexpr int kLeaves = 16;  // f32 leaves in a line
inline constexpr int kSums = 8;     // u64 exclusive prefix sums in a line: entry k is the sum of the children before k
inline constexpr int kRanks = 16;   // u32 ranks in a line

// A block is what lies under one bottom node of sums, and under one rank: 128 leaves. The smallest of so many changes
// rarely, and the ranks stay in the inner caches. (A rank for each line of leaves doubled the time of `set` at 10^7.)
inline constexpr int kBlockLines = kSums;
inline constexpr int kBlockLeaves = kBlockLines * kLeaves;

// Ranks order positive leaves, with 0 for "no positive leaf". So zero-filled memory is a valid, empty tree. The bit
// pattern of a positive float grows with it.
struct Upwards {
  static constexpr bool kNegates = false;
  static constexpr float kNone = 0;
  static constexpr uint32_t rank_of(float leaf) { return std::bit_cast<uint32_t>(leaf); }
  static constexpr float leaf_of(uint32_t rank) { return std::bit_cast<float>(rank); }
};
// The negated pattern grows as the float shrinks, and zero stays zero.
struct Downwards {
  static constexpr bool kNegates = true;
  static constexpr float kNone = std::numeric_limits<float>::infinity();
  static constexpr uint32_t rank_of(float leaf) { return -std::bit_cast<uint32_t>(leaf); }
  static constexpr float leaf_of(uint32_t rank) { return std::bit_cast<float>(-rank); }
};

// The value stored for a leaf of `p`: 0 for p <= 0 or NaN, else p within the normal numbers. In integers, for in a
// thread that flushes denormal numbers to zero (torch.set_flush_denormal) a comparison of floats would call them zero.
inline constexpr int32_t kLeast = 0x00800000, kGreatest = 0x7f7fffff, kInfinite = 0x7f800000;  // bits of floats
constexpr float clamp(float p) {
  const auto bits = std::bit_cast<int32_t>(p);
  return std::bit_cast<float>(bits > 0 && bits <= kInfinite ? std::clamp(bits, kLeast, kGreatest) : 0);
}

// The fixed-point grid on which leaves are summed, in units of a power of two. It is named by the exponent of the
// largest leaves that it holds, biased as in a float: those of 2^52 units and more are too large. 0 holds no positive
// leaf, so zero-filled memory is a tree that chooses its grid as soon as it is given one.
struct Grid {
  static constexpr int kUnitBits = 52;   // of a leaf: what `nearest` can hold
  static constexpr int kTotalBits = 63;  // of all leaves; those of 512 more still fit a word
  static constexpr int kRoomBits = 1;    // by which leaves and total may grow before a grid just chosen is outgrown
  static constexpr int64_t kMaxTop = 254 + kRoomBits + 20;  // for 2^31 of the largest floats

  double scale;    // units in 1.0
  uint32_t range;  // of the bits of the positive leaves that it holds

  explicit Grid(int64_t top)
      : scale(std::bit_cast<double>(static_cast<uint64_t>(kOne - top) << 52)),
        range((static_cast<uint32_t>(std::min(top, int64_t{254})) << 23)) {}

  // True for a positive, normal number that is not too large.
  bool holds(float p) const { return std::bit_cast<uint32_t>(p) - uint32_t{kLeast} < range; }

  // The exponent of a leaf as the float has it, for comparison with the grid's.
  static constexpr int64_t exponent(float leaf) { return std::bit_cast<int32_t>(leaf) >> 23; }

  // Units of a clamped leaf: the nearest number of them, but one at the least when it is positive.
  uint64_t units(float leaf) const {
    const uint64_t rounded = nearest(leaf);
    if (rounded == 0) [[unlikely]]
      return leaf > 0;
    return rounded;
  }

  // Adding 2^52 leaves the rounded integer in the low bits of the double; unlike a conversion to u64 this vectorises on
  // every x86 and arm. The product is exact, so it does not matter whether the sum is fused with it.
  uint64_t nearest(float leaf) const {
    return std::bit_cast<uint64_t>(static_cast<double>(leaf) * scale + 0x1p52) - 0x4330000000000000;
  }

 private:
  static constexpr int64_t kOne = 1023 + 127 + kUnitBits - 1;  // the top whose scale is 1, plus the bias of a double
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

  // Leaf of a line that holds target `x`. Requires x < the line's sum. `tiny`: there may be leaves below half a unit.
  template <bool tiny>
  static int pick(const float* leaves, uint64_t x, const Grid& grid) {
    uint64_t sums[kLeaves], sum = 0;
    for (int j = 0; j < kLeaves; j++) sums[j] = tiny ? grid.units(leaves[j]) : grid.nearest(leaves[j]);
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

  // Of so many leaves, whole lines of them.
  template <class Order, int kMany = kBlockLeaves>
  static uint32_t greatest_of(const float* leaves) {
    uint32_t top = 0;
    for (int j = 0; j < kMany; j++) top = std::max(top, Order::rank_of(leaves[j]));
    return top;
  }

  // Which one of a line of ranks is `rank`; the last one if none is.
  static int find(const uint32_t* ranks, uint32_t rank) {
    int k = 0;
    while (k < kRanks - 1 && ranks[k] != rank) k++;
    return k;
  }

  // Clamps a line of leaves, adds the number of positive ones to `count` and returns the largest.
  static float restore(float* leaves, int64_t& count) {
    for (int j = 0; j < kLeaves; j++) {
      leaves[j] = clamp(leaves[j]);
      count += std::bit_cast<int32_t>(leaves[j]) > 0;
    }
    return largest(leaves);
  }

  static float largest(const float* leaves) {
    int32_t top = 0;
    for (int j = 0; j < kLeaves; j++) top = std::max(top, std::bit_cast<int32_t>(leaves[j]));
    return std::bit_cast<float>(top);
  }

  static uint64_t sum(const float* leaves, const Grid& grid) {
    uint64_t sum = 0;
    for (int j = 0; j < kLeaves; j++) sum += grid.units(leaves[j]);
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

  template <bool tiny>
  TORCHREPLAY_AVX512 static int pick(const float* leaves, uint64_t x, const Grid& grid) {
    const __m512i target = _mm512_set1_epi64(static_cast<int64_t>(x));
    const __m512i low = inclusive_sums(units_of<tiny>(leaves, grid));
    const __m512i carry = _mm512_permutexvar_epi64(_mm512_set1_epi64(7), low);
    const __m512i high = _mm512_add_epi64(inclusive_sums(units_of<tiny>(leaves + 8, grid)), carry);
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

  template <class Order, int kMany = kBlockLeaves>
  TORCHREPLAY_AVX512 static uint32_t greatest_of(const float* leaves) {
    __m512i top = _mm512_setzero_si512();
    for (int j = 0; j < kMany; j += kLeaves) {
      const __m512i line = _mm512_load_si512(leaves + j);
      top = _mm512_max_epu32(top, Order::kNegates ? _mm512_sub_epi32(_mm512_setzero_si512(), line) : line);
    }
    return _mm512_reduce_max_epu32(top);
  }

  TORCHREPLAY_AVX512 static int find(const uint32_t* ranks, uint32_t rank) {
    const __m512i wanted = _mm512_set1_epi32(static_cast<int>(rank));
    const unsigned found = _mm512_cmpeq_epi32_mask(_mm512_load_si512(ranks), wanted);
    return __builtin_ctz(found | 1U << (kRanks - 1));
  }

  TORCHREPLAY_AVX512 static float restore(float* leaves, int64_t& count) {
    const __m512i given = _mm512_load_si512(leaves);
    const __mmask16 positive = _mm512_mask_cmple_epi32_mask(_mm512_cmpgt_epi32_mask(given, _mm512_setzero_si512()),
                                                            given, _mm512_set1_epi32(kInfinite));
    const __m512i at_least = _mm512_max_epi32(given, _mm512_set1_epi32(kLeast));
    const __m512i clamped = _mm512_maskz_min_epi32(positive, at_least, _mm512_set1_epi32(kGreatest));
    _mm512_store_si512(leaves, clamped);
    count += __builtin_popcount(positive);
    return std::bit_cast<float>(_mm512_reduce_max_epi32(clamped));
  }

  TORCHREPLAY_AVX512 static float largest(const float* leaves) {
    return std::bit_cast<float>(_mm512_reduce_max_epi32(_mm512_load_si512(leaves)));
  }

  TORCHREPLAY_AVX512 static uint64_t sum(const float* leaves, const Grid& grid) {
    const __m512i sums = _mm512_add_epi64(units_of<true>(leaves, grid), units_of<true>(leaves + 8, grid));
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(sums));
  }

 private:
  template <bool tiny>
  TORCHREPLAY_AVX512 static __m512i units_of(const float* leaves, const Grid& grid) {
    const __m512d leaf = _mm512_cvtps_pd(_mm256_load_ps(leaves));
    const __m512d shifted = _mm512_fmadd_pd(leaf, _mm512_set1_pd(grid.scale), _mm512_set1_pd(0x1p52));
    const __m512i rounded = _mm512_sub_epi64(_mm512_castpd_si512(shifted), _mm512_set1_epi64(0x4330000000000000));
    if (!tiny) return rounded;
    const __mmask8 positive = _mm512_cmp_pd_mask(leaf, _mm512_setzero_pd(), _CMP_GT_OQ);
    return _mm512_mask_max_epu64(rounded, positive, rounded, _mm512_set1_epi64(1));
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
