// The kernel knows which participants live: each holds one byte of a lock table, and the lock vanishes with its
// process.
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
#include <utility>

#include "segment/layout.h"
#include "system/descriptor.h"
#include "system/fault.h"

namespace torchreplay {

// Increases in every forked child: ids taken under an older generation belong to the parent.
inline std::atomic<uint64_t> fork_generation{0};

// Open-file-description byte locks on a descriptor of the segment that is opened separately and never mapped (a mapping
// of the description, inherited by a child, would keep the lock beyond its owner's death). Held under SIGSTOP, free for
// a zombie, blind to pid reuse and pid namespaces.
class Liveness {
 public:
  // `segment` is the mapped descriptor, kept; it must live as long as this object.
  explicit Liveness(const Descriptor& segment) : segment_(segment) {
    handle_forks();
    const std::lock_guard guard(registry().mutex);
    registry().all.insert(this);
  }
  ~Liveness() {
    const std::lock_guard guard(registry().mutex);
    registry().all.erase(this);
    lock_.reset();  // no fork comes in between
  }
  Liveness(const Liveness&) = delete;

  // For code with a lock of its own that forks wait for, and that uses this class with it held. It calls this before it
  // registers its own handlers: a fork then takes that lock first, as the code does.
  static void handle_forks() {
    static const int registered = pthread_atfork(before_fork, after_fork, forked);
    (void)registered;
  }

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
    if (!lock_.lost()) lock_byte(id, F_UNLCK);
  }

  bool owns(int id) {
    const std::lock_guard guard(mutex_);
    return own_[id];
  }

  // True as long as the kernel knows that this process owns byte `id`. A process that loses its descriptor loses its
  // bytes, and others take it for dead. Two system calls.
  bool holds(int id) {
    const std::lock_guard guard(mutex_);
    return own_[id] && !lock_.lost();
  }

  // Throws DescriptorLost when this process has lost what it owned. Two system calls.
  void require_own() {
    const std::lock_guard guard(mutex_);
    lock_.require_own();
  }

  // True when somebody, here or elsewhere, holds byte `id`. Less than a microsecond.
  bool alive(int id) {
    const std::lock_guard guard(mutex_);
    return held_elsewhere(id) || own_[id];
  }

  // Whether this process has a number yet.
  bool has_presence() const { return presence_.load(std::memory_order_relaxed) != 0; }

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
    own_nothing();
  }

  // True as long as the process of that attachment lives.
  bool present(uint32_t number) {
    const std::lock_guard guard(mutex_);
    return number == presence_.load(std::memory_order_relaxed) || held_elsewhere(presence_byte(number));
  }

  // Of the lock table.
  static int64_t presence_byte(uint32_t number) { return int64_t{kMaxParticipants} + number; }

 private:
  struct Registry {
    std::mutex mutex;
    std::set<Liveness*> all;
  };
  static Registry& registry() {
    static auto* r = new Registry;  // never destroyed: atfork handlers outlive static destructors
    return *r;
  }

  // A fork waits until no thread opens a descriptor: the child must know of it, or it would keep the parent's locks.
  static void before_fork() {
    registry().mutex.lock();
    for (Liveness* l : registry().all) l->mutex_.lock();
  }
  static void after_fork() {
    for (Liveness* l : registry().all) l->mutex_.unlock();
    registry().mutex.unlock();
  }

  // In a forked child: the inherited descriptor shares the parent's locks and would keep them alive after its death.
  static void forked() {
    fork_generation.fetch_add(1, std::memory_order_relaxed);
    for (Liveness* l : registry().all) l->own_nothing();
    after_fork();
  }

  void own_nothing() {
    lock_.reset();
    own_.reset();
    presence_.store(0, std::memory_order_relaxed);
  }

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
    if (lock_.get() < 0) {
      Descriptor opened = segment_.open_again(O_RDWR);
      TORCHREPLAY_FAULT("liveness.opened");
      opened.keep();
      lock_ = std::move(opened);
    }
    return lock_.require_own();
  }

  const Descriptor& segment_;
  Descriptor lock_;  // of the lock table
  std::mutex mutex_;
  std::bitset<kMaxParticipants> own_;
  std::atomic<uint32_t> presence_{0};
};

}  // namespace torchreplay
