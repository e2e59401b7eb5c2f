#include <sys/wait.h>

#include <boost/test/unit_test.hpp>
#include <stdexcept>
#include <thread>
#include <vector>

#include "draw/thread_pool.h"

BOOST_AUTO_TEST_SUITE(test_thread_pool)

using namespace torchreplay;

namespace {

// How often each part was done, and by whom the last time.
struct Record {
  explicit Record(int parts) : done(parts), worker(parts, -1) {}
  std::vector<std::atomic<int>> done;
  std::vector<int> worker;

  void operator()(int w, int part) {
    worker[part] = w;
    done[part]++;
  }
  bool complete() const {
    return std::ranges::all_of(done, [](const std::atomic<int>& n) { return n == 1; });
  }
};

}  // namespace

BOOST_AUTO_TEST_CASE(every_part_is_done_once) {
  for (int threads : {1, 2, 4})
    for (int parts : {0, 1, 2, 3, 100}) {
      Record record(parts);
      ThreadPool::instance().run(threads, parts, [&](int w, int part) { record(w, part); });
      BOOST_TEST(record.complete());
      for (int w : record.worker) BOOST_TEST((w >= 0 && w < threads));
    }
}

BOOST_AUTO_TEST_CASE(the_others_help) {
  // Each part waits until another one is begun: one thread alone would never end.
  std::atomic<int> begun{0};
  ThreadPool::instance().run(2, 2, [&](int, int) {
    begun++;
    while (begun < 2) std::this_thread::yield();
  });
  BOOST_TEST(begun == 2);
}

BOOST_AUTO_TEST_CASE(two_jobs_at_once_are_both_done) {
  const auto many = [] {
    for (int i = 0; i < 300; i++) {
      Record record(20);
      ThreadPool::instance().run(3, 20, [&](int w, int part) { record(w, part); });
      if (!record.complete()) return false;
    }
    return true;
  };
  bool other = false;
  std::thread thread([&] { other = many(); });
  BOOST_TEST(many());
  thread.join();
  BOOST_TEST(other);
}

BOOST_AUTO_TEST_CASE(what_a_part_throws_comes_out_and_the_pool_goes_on) {
  const auto fail = [](int, int part) {
    if (part == 7) throw std::runtime_error("part 7");
  };
  BOOST_CHECK_THROW(ThreadPool::instance().run(3, 50, fail), std::runtime_error);
  Record record(50);
  ThreadPool::instance().run(3, 50, [&](int w, int part) { record(w, part); });
  BOOST_TEST(record.complete());
}

BOOST_AUTO_TEST_CASE(a_forked_child_has_a_pool_of_its_own) {
  ThreadPool::instance().run(3, 50, [](int, int) {});
  const pid_t child = fork();
  if (child == 0) {
    fork_generation.fetch_add(1);  // as the handler does where a segment is attached
    Record record(50);
    ThreadPool::instance().run(3, 50, [&](int w, int part) { record(w, part); });
    _exit(record.complete() ? 0 : 1);
  }
  int status = 1;
  BOOST_REQUIRE(waitpid(child, &status, 0) == child);
  BOOST_TEST(status == 0);
}

BOOST_AUTO_TEST_SUITE_END()
