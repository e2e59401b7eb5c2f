// x^y of many floats at once, for priorities and importance-sampling weights. The same bits on every processor: the
// nearest float, or in one of some 10,000 results the one beside it.
#pragma once

#include <bit>
#include <cstdint>

#include "system/simd.h"

namespace torchreplay {

namespace power_kernel {

inline constexpr uint64_t kOne = 0x3ff0000000000000;       // bits of 1.0
inline constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcd;  // bits of sqrt(1/2)
inline constexpr double kIntegers = 0x1.8p52;              // a small number added to it is rounded to an integer
inline constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

// log2 x: the exponent, and of the significand m in [sqrt(1/2), sqrt(2)) the series
// ln m = 2 (s + s^3/3 + s^5/5 + ...) with s = (m - 1) / (m + 1), |s| < 0.172. Relative error below 1e-12.
[[gnu::always_inline]] inline double log2(double x) {
  const auto bits = std::bit_cast<uint64_t>(x);
  const uint64_t biased = (bits + (kOne - kSqrtHalf)) >> 52;
  const double exponent = std::bit_cast<double>(biased | 0x4330000000000000) - (0x1p52 + 1023);
  const double m = std::bit_cast<double>(bits - (biased << 52) + kOne);
  const double s = (m - 1) / (m + 1), q = s * s;
  double sum = 1.0 / 15;
  for (int k = 13; k >= 1; k -= 2) sum = sum * q + 1.0 / k;
  return exponent + 2 * kLog2e * s * sum;
}

// 2^x for |x| <= 160: the nearest integer goes into the exponent; 2^f = sum (f ln 2)^k / k!, |f| <= 1/2. Relative error
// below 1e-12.
[[gnu::always_inline]] inline double exp2(double x) {
  constexpr double kFactorial[] = {1, 1, 2, 6, 24, 120, 720, 5040, 40320, 362880, 3628800};
  const double shifted = x + kIntegers;
  const double f = (x - (shifted - kIntegers)) * kLn2;
  double sum = 1 / kFactorial[10];
  for (int k = 9; k >= 0; k--) sum = sum * f + 1 / kFactorial[k];
  return sum * std::bit_cast<double>((std::bit_cast<uint64_t>(shifted) << 52) + kOne);
}

// x is 0 or normal, and finite; y >= 0. Without branches, so that compilers make vectors of it.
[[gnu::always_inline]] inline float power(double x, double y) {
  double exponent = y * log2(x);
  exponent = exponent < 160 ? exponent : 160;  // beyond the floats on either side
  exponent = exponent > -160 ? exponent : -160;
  const auto result = static_cast<float>(exp2(exponent));
  return result * static_cast<float>((x > 0) | (y == 0));  // 0 to any power but 0
}

inline void portable(float* x, int64_t n, float y) {
  for (int64_t i = 0; i < n; i++) x[i] = power(x[i], y);
}
inline void portable(const double* x, int64_t n, double y, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = power(x[i], y);
}

#if defined(TORCHREPLAY_X86)
TORCHREPLAY_AVX512 inline void avx512(float* x, int64_t n, float y) {
  for (int64_t i = 0; i < n; i++) x[i] = power(x[i], y);
}
TORCHREPLAY_AVX512 inline void avx512(const double* x, int64_t n, double y, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = power(x[i], y);
}
#endif

}  // namespace power_kernel

// Replaces x[0..n), not negative and finite, by its powers; y >= 0, and 0^0 is 1.
inline void power(float* x, int64_t n, float y, Simd simd = best_simd()) {
#if defined(TORCHREPLAY_X86)
  if (simd == Simd::kAvx512) return power_kernel::avx512(x, n, y);
#endif
  static_cast<void>(simd);
  power_kernel::portable(x, n, y);
}

// Powers of doubles, each 0 or normal. A number beyond float may have a root within it, and an exponent rounded to a
// float would be ten floats off at 10^12.
inline void power(const double* x, int64_t n, double y, float* out, Simd simd = best_simd()) {
#if defined(TORCHREPLAY_X86)
  if (simd == Simd::kAvx512) return power_kernel::avx512(x, n, y, out);
#endif
  static_cast<void>(simd);
  power_kernel::portable(x, n, y, out);
}

}  // namespace torchreplay
