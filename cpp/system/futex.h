// Sleeping on a word in shared memory.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

namespace torchreplay {

// Sleeps until woken, until the word differs from `seen`, or for `ns` at most. Spurious returns are normal.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
  const timespec timeout{ns / 1'000'000'000, ns % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

// Changes the word and wakes everyone who sleeps on it, in any process.
inline void futex_signal(std::atomic<uint32_t>& word) {
  word.fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace torchreplay
