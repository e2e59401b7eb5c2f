#include <sys/resource.h>
#include <sys/wait.h>

#include <boost/test/unit_test.hpp>
#include <csignal>

#include "session/segment_lock.h"

BOOST_AUTO_TEST_SUITE(test_process_state)

using namespace torchreplay;

BOOST_AUTO_TEST_CASE(a_process_is_told_from_one_that_has_ended) {
  const int pid = fork();
  if (pid == 0) {
    for (;;) pause();
  }
  kill(pid, SIGSTOP);
  waitpid(pid, nullptr, WUNTRACED);
  BOOST_TEST(process_state(pid) == 'T');
  kill(pid, SIGKILL);
  waitid(P_PID, static_cast<id_t>(pid), nullptr, WEXITED | WNOWAIT);
  BOOST_TEST(process_state(pid) == 'Z');
  waitpid(pid, nullptr, 0);
  BOOST_TEST(process_state(pid) == kEnded);
}

BOOST_AUTO_TEST_CASE(a_process_that_can_open_nothing_more_takes_nobody_for_ended) {
  rlimit before;
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit none{0, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  const char state = process_state(getpid());
  setrlimit(RLIMIT_NOFILE, &before);
  BOOST_TEST(state == kUnknown);
  BOOST_TEST(process_state(getpid()) == 'R');
}

BOOST_AUTO_TEST_SUITE_END()
