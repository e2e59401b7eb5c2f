// Division by a number that stays the same: a multiplication instead, as compilers do it for constants.
#pragma once

#include <cstdint>

namespace torchreplay {

class Divisor {
 public:
  // `n` is not 0.
  explicit Divisor(uint64_t n) : n_(n), reciprocal_(~uint64_t{0} / n) {}

  struct Division {
    uint64_t quotient, rest;
  };

  // The high half of x floor((2^64 - 1) / n) misses x / n by less than 1, so what it rounds to misses the quotient by 1
  // at most.
  Division divide(uint64_t x) const {
    __extension__ using Wide = unsigned __int128;
    const auto quotient = static_cast<uint64_t>(Wide{x} * reciprocal_ >> 64);
    const uint64_t rest = x - quotient * n_;
    return rest < n_ ? Division{quotient, rest} : Division{quotient + 1, rest - n_};
  }

  uint64_t quotient(uint64_t x) const { return divide(x).quotient; }
  uint64_t rest(uint64_t x) const { return divide(x).rest; }

 private:
  uint64_t n_, reciprocal_;
};

}  // namespace torchreplay
