// Processes that are stopped after every machine instruction, and what those find who survive them.
#pragma once

#include <sys/ptrace.h>

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <functional>

#include "children.h"
#include "invariants.h"
#include "segments.h"

namespace torchreplay::testing {

// A copy of a segment as a survivor would find it, with a lock of its own.
class Image {
 public:
  explicit Image(const SegmentMemory& of) : source_(of), m_(memory_file(of.layout().bytes), of.layout()) {}

  // Takes over what changed. False when nothing did.
  bool refresh() {
    // The table of participants is large, and no part of what is repaired.
    const uint64_t rows = source_.layout().records;
    const bool same = std::memcmp(&seen_, source_.base(), sizeof seen_) == 0 &&
                      std::memcmp(rest_.data(), source_.base() + rows, rest_.size()) == 0;
    if (same) return false;
    std::memcpy(seen_, source_.base(), sizeof seen_);
    rest_.assign(source_.base() + rows, source_.base() + source_.layout().bytes);
    std::memcpy(m_.base(), seen_, sizeof seen_);
    std::memcpy(m_.base() + rows, rest_.data(), rest_.size());
    m_.header().mutex.init();
    return true;
  }
  SegmentMemory& memory() { return m_; }

 private:
  const SegmentMemory& source_;
  SegmentMemory m_;
  char seen_[kSegmentHeaderBytes] = {};
  std::vector<char> rest_;
};

// What the next owner of a dead owner's lock does.
inline void repair(SegmentMemory& m) {
  if (m.header().dirty != Dirty::kClean) Recovery(m).run();
}

// For tests that take too long under ThreadSanitizer, with a hundred instructions for each: it watches threads, and has
// nothing to see in processes.
#ifdef TORCHREPLAY_RACEFREE
inline const auto kUnlessThreadSanitized = boost::unit_test::disabled();
#else
inline const auto kUnlessThreadSanitized = boost::unit_test::enabled();
#endif

// What becomes of a traced child.
enum class Fate {
  kStep,    // one more instruction
  kFinish,  // all the others, without a stop
  kDie,
};

// Runs `body` in a child one machine instruction at a time and asks `look` after each.
inline void single_step(const std::function<void()>& body, const std::function<Fate()>& look) {
  Child child([&] {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
    raise(SIGSTOP);
    body();
    raise(SIGSTOP);
  });
  int status = 0;
  waitpid(child.pid(), &status, WUNTRACED);
  if (!WIFSTOPPED(status)) throw std::runtime_error("the child cannot be traced");
  Fate fate = Fate::kStep;
  for (int stops = 0; stops == 0 || WSTOPSIG(status) != SIGSTOP; stops++) {
    if (ptrace(fate == Fate::kStep ? PTRACE_SINGLESTEP : PTRACE_CONT, child.pid(), nullptr, nullptr) != 0)
      throw std::system_error(errno, std::generic_category(), "ptrace");
    waitpid(child.pid(), &status, 0);
    if (!WIFSTOPPED(status)) throw std::runtime_error("the traced child ended");
    fate = look();
    if (fate == Fate::kDie) return;
  }
}

// Of test cases that trace: where the system does not let a parent trace its child they are skipped, and say why.
inline boost::test_tools::assertion_result tracing_is_allowed(boost::unit_test::test_unit_id) {
  Child child([] {
    if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(77);
    raise(SIGSTOP);
  });
  siginfo_t info{};
  waitid(P_PID, static_cast<id_t>(child.pid()), &info, WSTOPPED | WEXITED | WNOWAIT);
  boost::test_tools::assertion_result allowed(info.si_code != CLD_EXITED);
  allowed.message() << "this system does not let a process trace its child";
  return allowed;
}

inline const auto kWhereTracingIsAllowed = boost::unit_test::precondition(tracing_is_allowed);

// Kills the process that runs `body` after each of its instructions, lets a survivor repair and absorb, and checks
// everything.
inline void kill_everywhere(SegmentMemory& m, const std::function<void()>& body,
                            const std::function<std::string(SegmentMemory&)>& check) {
  Image image(m);
  int states = 0, dirty = 0;
  std::string found;
  single_step(body, [&] {
    if (!image.refresh()) return Fate::kStep;
    SegmentMemory& survivor = image.memory();
    states++;
    dirty += survivor.header().dirty != Dirty::kClean;
    repair(survivor);
    settle(survivor);
    found = violation(survivor);
    if (found.empty()) found = check(survivor);
    return found.empty() ? Fate::kStep : Fate::kDie;
  });
  BOOST_TEST(found == "");
  BOOST_TEST(states > 10);
  BOOST_TEST(dirty > 5);
}

inline std::vector<float> leaves_of(const SegmentMemory& m) {
  const PriorityTree tree = m.tree();
  return {tree.leaves(), tree.leaves() + m.capacity()};
}

}  // namespace torchreplay::testing
