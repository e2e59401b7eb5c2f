// File descriptors with an owner.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace torchreplay {

// Thrown where a kept descriptor was closed by somebody else.
struct DescriptorLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), kept_(other.kept_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset();
    fd_ = std::exchange(other.fd_, -1);
    kept_ = other.kept_;
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  // Closes it, unless that was done behind its back: its number may be another file's by now.
  void reset() {
    if (fd_ >= 0 && !lost()) close(fd_);
    fd_ = -1;
    kept_.reset();
  }

  // A second descriptor of the same file, closed on exec.
  static Descriptor duplicate(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
      throw std::system_error(errno, std::generic_category(), "cannot duplicate the descriptor of a replay segment");
    return Descriptor(copy);
  }

  // Another description of the same file, which shares no lock with this one, closed on exec.
  Descriptor open_again(int flags) const {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", require_own());
    Descriptor again(open(path, flags | O_CLOEXEC));
    if (again.get() < 0)
      throw std::system_error(errno, std::generic_category(), "cannot open the replay segment again");
    return again;
  }

  // Takes over `other`'s file, and keeps it. The number stays the same.
  void replace(const Descriptor& other) {
    if (dup3(other.get(), require_own(), O_CLOEXEC) < 0)
      throw std::system_error(errno, std::generic_category(), "dup3 of a replay segment");
    keep();
  }

  // From now on it differs from another file that gets its number. For descriptors that stay open in programs that
  // close those which they do not know, as daemons do. Leaves a mark in the file position, so nobody may use that.
  void keep() {
    uint32_t mark = 0;
    if (lseek(fd_, 0, SEEK_CUR) == 0 && getrandom(&mark, sizeof mark, 0) == sizeof mark) lseek(fd_, mark, SEEK_SET);
    kept_ = identity();
  }

  // Whether a kept descriptor was closed by somebody else. Two system calls.
  bool lost() const { return kept_ && identity() != *kept_; }

  // The number; throws DescriptorLost when it is no longer this descriptor's.
  int require_own() const {
    if (lost()) throw_lost();
    return fd_;
  }

  [[noreturn]] static void throw_lost() {
    throw DescriptorLost(
        "somebody else has closed the replay buffer's descriptors, as os.closerange() does at the start of a daemon: "
        "make or attach the buffer after that, or leave its descriptors open");
  }

  int get() const { return fd_; }
  uint64_t file_bytes() const {
    struct stat st;
    if (fstat(fd_, &st) != 0) throw std::system_error(errno, std::generic_category(), "fstat on a replay segment");
    return static_cast<uint64_t>(st.st_size);
  }

 private:
  // Two descriptions of one file differ in their marks.
  struct Identity {
    dev_t device = 0;
    ino_t inode = 0;
    off_t mark = 0;
    bool operator==(const Identity&) const = default;
  };

  Identity identity() const {
    struct stat status;
    if (fstat(fd_, &status) != 0) return {};
    return {status.st_dev, status.st_ino, lseek(fd_, 0, SEEK_CUR)};
  }

  int fd_;
  std::optional<Identity> kept_;
};

}  // namespace torchreplay
