// Who is alive, asked of the kernel: every participant holds one byte of a lock table that vanishes with its process.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <bitset>
#include <cerrno>
#include <mutex>
#include <set>
#include <system_error>

#include "layout.h"

namespace torchreplay {

// Increases in every forked child: ids taken under an older generation belong to the parent.
inline std::atomic<uint64_t> fork_generation{0};

// Open-file-description byte locks on a descriptor of the segment that is opened separately and never mapped (a mapping
// of the description, inherited by a child, would keep the lock beyond its owner's death). Held under SIGSTOP, free for
// a zombie, blind to pid reuse and pid namespaces.
class Liveness {
 public:
  // `segment_fd` is the mapped descriptor; it must stay open as long as this object lives.
  explicit Liveness(int segment_fd) : segment_fd_(segment_fd) {
    static const bool registered = [] {
      pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); }, forked);
      return true;
    }();
    (void)registered;
    const std::lock_guard guard(registry().mutex);
    registry().all.insert(this);
  }
  ~Liveness() {
    const std::lock_guard guard(registry().mutex);
    registry().all.erase(this);
    if (fd_ >= 0) close(fd_);
  }
  Liveness(const Liveness&) = delete;

  // Takes byte `id`: false when another process holds it, or this one does.
  bool take(int id) {
    const std::lock_guard guard(mutex_);
    if (own_[id] || !lock_byte(id, F_WRLCK)) return false;
    own_[id] = true;
    return true;
  }

  void release(int id) {
    const std::lock_guard guard(mutex_);
    if (!own_[id]) return;
    own_[id] = false;
    lock_byte(id, F_UNLCK);
  }

  bool owns(int id) {
    const std::lock_guard guard(mutex_);
    return own_[id];
  }

  // True when somebody, here or elsewhere, holds byte `id`. Less than a microsecond.
  bool alive(int id) {
    const std::lock_guard guard(mutex_);
    return own_[id] || held_elsewhere(id);
  }

  // The number of this attachment: never 0, and of no other one. It holds a byte beyond those of the ids for as long as
  // its process lives. `last` counts the attachments of the segment.
  uint32_t presence(std::atomic<uint32_t>& last) {
    if (const uint32_t own = presence_.load(std::memory_order_relaxed)) return own;
    const std::lock_guard guard(mutex_);
    uint32_t number = presence_.load(std::memory_order_relaxed);
    while (number == 0 || !lock_byte(presence_byte(number), F_WRLCK)) number = last.fetch_add(1) + 1;
    presence_.store(number, std::memory_order_relaxed);
    return number;
  }

  // Gives everything back at once, as the death of this process would: its ids, and its attachment.
  void forget() {
    const std::lock_guard guard(mutex_);
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    own_.reset();
    presence_.store(0, std::memory_order_relaxed);
  }

  // True as long as the process of that attachment lives.
  bool present(uint32_t number) {
    const std::lock_guard guard(mutex_);
    return number == presence_.load(std::memory_order_relaxed) || held_elsewhere(presence_byte(number));
  }

 private:
  struct Registry {
    std::mutex mutex;
    std::set<Liveness*> all;
  };
  static Registry& registry() {
    static auto* r = new Registry;  // never destroyed: atfork handlers outlive static destructors
    return *r;
  }

  // In a forked child: the inherited descriptor shares the parent's locks and would keep them alive after its death.
  static void forked() {
    fork_generation.fetch_add(1, std::memory_order_relaxed);
    for (Liveness* l : registry().all) {
      if (l->fd_ >= 0) close(l->fd_);
      l->fd_ = -1;
      l->own_.reset();
      l->presence_.store(0, std::memory_order_relaxed);
      new (&l->mutex_) std::mutex;  // another thread of the parent may have held it
    }
    registry().mutex.unlock();
  }

  static int64_t presence_byte(uint32_t number) { return int64_t{kMaxParticipants} + number; }

  static struct flock byte(int64_t id, short type) {
    struct flock f{};
    f.l_type = type;
    f.l_whence = SEEK_SET;
    f.l_start = id;
    f.l_len = 1;
    return f;
  }

  bool held_elsewhere(int64_t id) {
    struct flock probe = byte(id, F_WRLCK);
    if (fcntl(descriptor(), F_OFD_GETLK, &probe) != 0)
      throw std::system_error(errno, std::generic_category(), "F_OFD_GETLK on the replay segment");
    return probe.l_type != F_UNLCK;
  }

  bool lock_byte(int64_t id, short type) {
    struct flock f = byte(id, type);
    if (fcntl(descriptor(), F_OFD_SETLK, &f) == 0) return true;
    if (errno == EAGAIN || errno == EACCES) return false;
    throw std::system_error(errno, std::generic_category(), "F_OFD_SETLK on the replay segment");
  }

  int descriptor() {
    if (fd_ >= 0) return fd_;
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", segment_fd_);
    fd_ = open(path, O_RDWR | O_CLOEXEC);
    if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "cannot open the replay segment's lock table");
    return fd_;
  }

  int segment_fd_;
  int fd_ = -1;
  std::mutex mutex_;
  std::bitset<kMaxParticipants> own_;
  std::atomic<uint32_t> presence_{0};
};

}  // namespace torchreplay
