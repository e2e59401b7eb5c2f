// Element types that a row can hold, and the conversions between them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace torchreplay {

// The order is part of the segment format: append only.
enum class Element : uint8_t { kBool, kU8, kU16, kU32, kU64, kI8, kI16, kI32, kI64, kF16, kBF16, kF32, kF64 };
inline constexpr int kElements = 13;

constexpr int item_size(Element e) {
  constexpr int sizes[kElements] = {1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};
  return sizes[static_cast<int>(e)];
}

// Position in numpy's order of kinds: bool < unsigned < signed < floating.
constexpr int kind_rank(Element e) {
  return e == Element::kBool ? 0 : e <= Element::kU64 ? 1 : e <= Element::kI64 ? 2 : 3;
}

// numpy.can_cast(from, to, casting="same_kind").
constexpr bool casts(Element from, Element to) { return kind_rank(from) <= kind_rank(to); }

// A binary floating-point format of 16 bits: sign, exponent, kMantissa stored bits of significand.
template <int kMantissa>
struct Float16 {
  static constexpr int kBias = (1 << (14 - kMantissa)) - 1;
  static constexpr uint16_t kInfinity = static_cast<uint16_t>(((2 * kBias + 1) << kMantissa));
  uint16_t bits;

  Float16() = default;

  // Rounds to nearest, ties to even, straight from double (through float would round twice).
  explicit Float16(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double a = std::fabs(value);
    if (std::isnan(value)) {
      bits = sign | kInfinity | (1 << (kMantissa - 1));
    } else if (std::isinf(value)) {
      bits = sign | kInfinity;
    } else {
      const int exponent = a == 0 ? 1 - kBias : std::max(std::ilogb(a), 1 - kBias);
      if (exponent > kBias) {
        bits = sign | kInfinity;
        return;
      }
      // A carry out of the significand runs into the exponent, which is what rounding up asks for.
      const auto significand = static_cast<int>(std::nearbyint(std::ldexp(a, kMantissa - exponent)));
      bits = static_cast<uint16_t>(sign + ((exponent + kBias - 1) << kMantissa) + significand);
    }
  }

  explicit operator double() const {
    const int exponent = (bits & 0x7fff) >> kMantissa, fraction = bits & ((1 << kMantissa) - 1);
    double a;
    if (exponent == 2 * kBias + 1) {
      a = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    } else {
      a = std::ldexp(fraction + (exponent ? 1 << kMantissa : 0), (exponent ? exponent : 1) - kBias - kMantissa);
    }
    return (bits & 0x8000) ? -a : a;
  }
};
using Half = Float16<10>;
using BFloat16 = Float16<7>;

template <class To, class From>
To convert(From value) {
  if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>) {
    return convert<To>(static_cast<double>(value));
  } else if constexpr (std::is_same_v<To, Half> || std::is_same_v<To, BFloat16>) {
    return To(static_cast<double>(value));
  } else {
    return static_cast<To>(value);
  }
}

// An array of any element type and strides (in bytes), as a user hands it over. Does not own its memory.
struct StridedArray {
  static constexpr int kMaxDims = 16;
  const char* data = nullptr;
  Element element = Element::kU8;
  int dims = 0;
  int64_t shape[kMaxDims];
  int64_t stride[kMaxDims];
};

namespace detail {

template <class To, class From>
char* copy_level(char* to, const char* from, const StridedArray& a, int d) {
  if (d == a.dims) {
    From value;
    std::memcpy(&value, from, sizeof value);
    const To converted = convert<To>(value);
    std::memcpy(to, &converted, sizeof converted);
    return to + sizeof(To);
  }
  for (int64_t i = 0; i < a.shape[d]; i++, from += a.stride[d]) to = copy_level<To, From>(to, from, a, d + 1);
  return to;
}

template <class To>
void copy_to(char* to, const char* from, const StridedArray& a, int d) {
  switch (a.element) {
    case Element::kBool:
    case Element::kU8:
      copy_level<To, uint8_t>(to, from, a, d);
      break;
    case Element::kU16:
      copy_level<To, uint16_t>(to, from, a, d);
      break;
    case Element::kU32:
      copy_level<To, uint32_t>(to, from, a, d);
      break;
    case Element::kU64:
      copy_level<To, uint64_t>(to, from, a, d);
      break;
    case Element::kI8:
      copy_level<To, int8_t>(to, from, a, d);
      break;
    case Element::kI16:
      copy_level<To, int16_t>(to, from, a, d);
      break;
    case Element::kI32:
      copy_level<To, int32_t>(to, from, a, d);
      break;
    case Element::kI64:
      copy_level<To, int64_t>(to, from, a, d);
      break;
    case Element::kF16:
      copy_level<To, Half>(to, from, a, d);
      break;
    case Element::kBF16:
      copy_level<To, BFloat16>(to, from, a, d);
      break;
    case Element::kF32:
      copy_level<To, float>(to, from, a, d);
      break;
    case Element::kF64:
      copy_level<To, double>(to, from, a, d);
      break;
  }
}

}  // namespace detail

// Copies the dimensions `first_dim`.. of `a`, starting at `from`, to contiguous memory of element type `to_element`.
inline void copy_converted(char* to, Element to_element, const char* from, const StridedArray& a, int first_dim) {
  switch (to_element) {
    case Element::kBool:
    case Element::kU8:
      detail::copy_to<uint8_t>(to, from, a, first_dim);
      break;
    case Element::kU16:
      detail::copy_to<uint16_t>(to, from, a, first_dim);
      break;
    case Element::kU32:
      detail::copy_to<uint32_t>(to, from, a, first_dim);
      break;
    case Element::kU64:
      detail::copy_to<uint64_t>(to, from, a, first_dim);
      break;
    case Element::kI8:
      detail::copy_to<int8_t>(to, from, a, first_dim);
      break;
    case Element::kI16:
      detail::copy_to<int16_t>(to, from, a, first_dim);
      break;
    case Element::kI32:
      detail::copy_to<int32_t>(to, from, a, first_dim);
      break;
    case Element::kI64:
      detail::copy_to<int64_t>(to, from, a, first_dim);
      break;
    case Element::kF16:
      detail::copy_to<Half>(to, from, a, first_dim);
      break;
    case Element::kBF16:
      detail::copy_to<BFloat16>(to, from, a, first_dim);
      break;
    case Element::kF32:
      detail::copy_to<float>(to, from, a, first_dim);
      break;
    case Element::kF64:
      detail::copy_to<double>(to, from, a, first_dim);
      break;
  }
}

// True when dimensions `first_dim`.. of `a` are C-contiguous.
inline bool is_dense(const StridedArray& a, int first_dim) {
  int64_t expected = item_size(a.element);
  for (int d = a.dims - 1; d >= first_dim; d--) {
    if (a.shape[d] != 1 && a.stride[d] != expected) return false;
    expected *= a.shape[d];
  }
  return true;
}

}  // namespace torchreplay
