// A file descriptor with an owner.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

namespace torchreplay {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }

  // A second descriptor of the same file, closed on exec.
  static Descriptor duplicate(int fd) {
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
      throw std::system_error(errno, std::generic_category(), "cannot duplicate the descriptor of a replay segment");
    return Descriptor(copy);
  }

  int get() const { return fd_; }
  uint64_t file_bytes() const {
    struct stat st;
    if (fstat(fd_, &st) != 0) throw std::system_error(errno, std::generic_category(), "fstat on a replay segment");
    return static_cast<uint64_t>(st.st_size);
  }

 private:
  int fd_;
};

}  // namespace torchreplay
