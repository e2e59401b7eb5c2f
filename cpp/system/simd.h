// Which instructions the tree and the random generator run on, decided at run time: the library is built without -march
// flags.
#pragma once

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#define TORCHREPLAY_X86 1
// gcc 12 finds its own intrinsics uninitialised (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#define TORCHREPLAY_AVX512 __attribute__((target("avx512f,avx512dq")))
#endif

namespace torchreplay {

enum class Simd { kPortable, kAvx512 };

// True where this processor and its operating system run the AVX-512 instructions in use.
inline bool has_avx512() {
#if defined(TORCHREPLAY_X86)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

// The fastest instructions here. TORCHREPLAY_SIMD=portable in the environment, read once, forces the portable twin.
inline Simd best_simd() {
  static const Simd best = [] {
    const char* wanted = std::getenv("TORCHREPLAY_SIMD");
    const bool portable = wanted != nullptr && std::strcmp(wanted, "portable") == 0;
    return has_avx512() && !portable ? Simd::kAvx512 : Simd::kPortable;
  }();
  return best;
}

}  // namespace torchreplay
