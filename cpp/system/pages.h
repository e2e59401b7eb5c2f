// The pages of shared memory: huge ones where the system has them to give. Draws touch rows all over a ring. With pages
// of 4 KB nearly each row misses the translation buffer, and every process would map the pages one by one.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>

#include "system/descriptor.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace torchreplay {

inline constexpr uint64_t kPage = 4096;
inline constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Maps `bytes` of a file, whole pages, from `offset` on, a multiple of kHugePage. What the file has in huge pages is
// mapped in such.
inline char* map_shared(const Descriptor& fd, uint64_t bytes, uint64_t offset = 0) {
  const auto map = [&](void* at, int flags) {
    void* p = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd.get(), static_cast<off_t>(offset));
    if (p == MAP_FAILED)
      throw std::system_error(errno, std::generic_category(),
                              "cannot map " + std::to_string(bytes >> 20) + " MiB of a replay segment");
    return static_cast<char*>(p);
  };
  if (bytes < kHugePage) return map(nullptr, 0);
  // Room for the file at an aligned address; what is too much of it goes back.
  const uint64_t room = bytes + kHugePage;
  void* reserved = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return map(nullptr, 0);
  auto* start = static_cast<char*>(reserved);
  char* aligned = start + -reinterpret_cast<uintptr_t>(start) % kHugePage;
  if (aligned != start) munmap(start, static_cast<size_t>(aligned - start));
  munmap(aligned + bytes, static_cast<size_t>(start + room - (aligned + bytes)));
  try {
    return map(aligned, MAP_FIXED);
  } catch (...) {
    munmap(aligned, bytes);
    throw;
  }
}

// Gives the part of a fresh memory file that lies in [offset, offset + bytes) huge pages, as far as it can. They cost
// no more time than small ones while the system has them; false: it has not, or TORCHREPLAY_HUGE_PAGES=0 forbids them.
inline bool take_huge_pages(const Descriptor& fd, uint64_t offset, uint64_t bytes) {
  const char* wanted = std::getenv("TORCHREPLAY_HUGE_PAGES");
  if (wanted && std::strcmp(wanted, "0") == 0) return false;
  bytes -= bytes % kHugePage;
  if (bytes == 0) return true;
  char* base = map_shared(fd, bytes, offset);
  bool taken = true;
  for (uint64_t at = 0; taken && at < bytes; at += kHugePage) {
    // Only where a small page is mapped the kernel looks for more. Allocated first: a bare touch could raise SIGBUS.
    taken = posix_fallocate(fd.get(), static_cast<off_t>(offset + at), kPage) == 0;
    if (!taken) break;
    static_cast<void>(*const_cast<volatile char*>(base + at));
    taken = madvise(base + at, kHugePage, MADV_COLLAPSE) == 0;
  }
  munmap(base, bytes);
  return taken;
}

}  // namespace torchreplay
