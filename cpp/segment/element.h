// Element types that a row can hold, and the conversions between them.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

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

// The types that hold elements, in the order of `Element`.
using ElementTypes = std::tuple<uint8_t, uint8_t, uint16_t, uint32_t, uint64_t, int8_t, int16_t, int32_t, int64_t, Half,
                                BFloat16, float, double>;

// make.operator()<To, From>() for each pair of types, at pair_of() their elements.
template <class Make>
constexpr auto each_pair(Make make) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return std::array{make.template operator()<std::tuple_element_t<i / kElements, ElementTypes>,
                                               std::tuple_element_t<i % kElements, ElementTypes>>()...};
  }(std::make_index_sequence<size_t{kElements} * kElements>{});
}

constexpr size_t pair_of(Element to, Element from) {
  return static_cast<size_t>(to) * kElements + static_cast<size_t>(from);
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

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Copies a dimension in which values are `stride` bytes apart: by vector instructions where that is a constant.
template <class To, class From>
inline __attribute__((always_inline)) char* copy_run(char* to, const char* from, int64_t n, int64_t stride) {
  for (int64_t i = 0; i < n; i++) {
    const To converted = convert<To>(load<From>(from + i * stride));
    std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &converted, sizeof converted);
  }
  return to + n * static_cast<int64_t>(sizeof(To));
}

template <class To, class From>
char* copy_level(char* to, const char* from, const StridedArray& a, int d) {
  if (d == a.dims) return copy_run<To, From>(to, from, 1, 0);
  const int64_t n = a.shape[d], stride = a.stride[d];
  if (d + 1 == a.dims)
    return stride == sizeof(From) ? copy_run<To, From>(to, from, n, sizeof(From))
                                  : copy_run<To, From>(to, from, n, stride);
  for (int64_t i = 0; i < n; i++) to = copy_level<To, From>(to, from + i * stride, a, d + 1);
  return to;
}

}  // namespace detail

// Copies the dimensions `first_dim`.. of `a`, starting at `from`, to contiguous memory of element type `to_element`.
// Whatever stands for true becomes 1: other languages' bools may be any byte.
inline void make_bools(char* bytes, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) bytes[i] = bytes[i] != 0;
}

inline void copy_converted(char* to, Element to_element, const char* from, const StridedArray& a, int first_dim) {
  static constexpr auto kCopies = each_pair([]<class To, class From>() { return &detail::copy_level<To, From>; });
  kCopies[pair_of(to_element, a.element)](to, from, a, first_dim);
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

// A value that its type holds and another does not.
struct Unfit {
  int64_t index[StridedArray::kMaxDims];
  std::string value;
};

namespace detail {

template <class T>
inline constexpr double kLargest = static_cast<double>(std::numeric_limits<T>::max());
template <>
inline constexpr double kLargest<Half> = 0x1.ffcp15;
template <>
inline constexpr double kLargest<BFloat16> = 0x1.fep127;

// The smallest number that a floating type rounds to infinity: halfway between its largest and the next power of two,
// for ties go to the even one.
template <class T>
inline constexpr double kInfiniteFrom = std::numeric_limits<double>::infinity();
template <>
inline constexpr double kInfiniteFrom<Half> = 0x1.ffep15;
template <>
inline constexpr double kInfiniteFrom<BFloat16> = 0x1.ffp127;
template <>
inline constexpr double kInfiniteFrom<float> = 0x1.ffffffp127;

// Whether a type has finite numbers that another, which it casts to, does not hold, not even rounded.
template <class To, class From>
constexpr bool overflows() {
  if constexpr (!std::is_integral_v<To>)
    return kLargest<From> >= kInfiniteFrom<To>;
  else if constexpr (!std::is_integral_v<From>)
    return false;
  else
    return !std::in_range<To>(std::numeric_limits<From>::max()) || !std::in_range<To>(std::numeric_limits<From>::min());
}

// Zero where `value` fits. What is infinite or NaN already fits every floating type. Made of what vectors of integers
// can do everywhere, which is less than vectors of comparisons would need.
template <class To, class From>
auto excess(From value) {
  if constexpr (std::is_integral_v<To>) {
    using Bits = std::make_unsigned_t<From>;
    constexpr auto kHeld = static_cast<Bits>(std::numeric_limits<To>::max());
    return static_cast<Bits>(static_cast<Bits>(value < From{} ? ~value : value) & static_cast<Bits>(~kHeld));
  } else {
    using Number = std::conditional_t<std::is_same_v<From, float>, float, double>;
    using Bits = std::conditional_t<std::is_same_v<From, float>, uint32_t, uint64_t>;
    constexpr auto kFrom = std::bit_cast<Bits>(static_cast<Number>(kInfiniteFrom<To>)),
                   kInfinity = std::bit_cast<Bits>(std::numeric_limits<Number>::infinity());
    constexpr Bits kSign = ~(~Bits{} >> 1);
    const Bits size = std::bit_cast<Bits>(static_cast<Number>(value)) & ~kSign;  // ordered as the numbers are
    return (kFrom - 1 - size) & (size - kInfinity) & kSign;
  }
}

// Arrays that repeat a value may be longer than anything: how much of a dimension there is to look at.
inline int64_t distinct(const StridedArray& a, int d) {
  return a.stride[d] ? a.shape[d] : std::min<int64_t>(a.shape[d], 1);
}

// Of a dimension in which values are `stride` bytes apart. No branch for each: they become vector instructions where
// that is a constant.
template <class To, class From>
inline __attribute__((always_inline)) bool run_fits(const char* from, int64_t n, int64_t stride) {
  decltype(excess<To>(From{})) all = 0;
  for (int64_t i = 0; i < n; i++) all |= excess<To>(load<From>(from + i * stride));
  return all == 0;
}

template <class To, class From>
bool level_fits(const char* from, const StridedArray& a, int d) {
  const int64_t n = distinct(a, d), stride = a.stride[d];
  if (d + 1 == a.dims)
    return stride == sizeof(From) ? run_fits<To, From>(from, n, sizeof(From)) : run_fits<To, From>(from, n, stride);
  bool fit = true;
  for (int64_t i = 0; i < n; i++) fit &= level_fits<To, From>(from + i * stride, a, d + 1);
  return fit;
}

template <class From>
std::string as_text(From value) {
  if constexpr (std::is_same_v<From, Half> || std::is_same_v<From, BFloat16>) {
    return as_text(static_cast<float>(static_cast<double>(value)));
  } else {
    char text[32];
    return {text, std::to_chars(text, text + sizeof text, value).ptr};
  }
}

template <class To, class From>
bool locate(const char* from, const StridedArray& a, int d, Unfit& unfit) {
  if (d == a.dims) {
    const From value = load<From>(from);
    if (excess<To>(value) == 0) return false;
    unfit.value = as_text(value);
    return true;
  }
  for (int64_t i = 0; i < distinct(a, d); i++) {
    unfit.index[d] = i;
    if (locate<To, From>(from + i * a.stride[d], a, d + 1, unfit)) return true;
  }
  return false;
}

template <class To, class From>
bool find_unfit(const StridedArray& a, Unfit& unfit) {
  if constexpr (overflows<To, From>()) {
    int64_t side_by_side = is_dense(a, 0) ? 1 : 0;
    for (int d = 0; side_by_side && d < a.dims; d++) side_by_side *= a.shape[d];
    const bool fit = side_by_side ? run_fits<To, From>(a.data, side_by_side, sizeof(From))
                                  : a.dims > 0 && level_fits<To, From>(a.data, a, 0);
    return !fit && locate<To, From>(a.data, a, 0, unfit);
  }
  return false;
}

}  // namespace detail

// Whether `a`, whose type casts to `to`, has a value that `to` does not hold; `unfit` is then the first one.
inline bool find_unfit(const StridedArray& a, Element to, Unfit& unfit) {
  static constexpr auto kFinders = each_pair([]<class To, class From>() { return &detail::find_unfit<To, From>; });
  return kFinders[pair_of(to, a.element)](a, unfit);
}

}  // namespace torchreplay
