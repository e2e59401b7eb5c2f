// Threads that share the work of one large copy: one pool for the process, that waits between its jobs.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>

#include "segment/liveness.h"
#include "system/thread.h"

namespace torchreplay {

class ThreadPool {
 public:
  // A forked child has none of the threads, and gets a pool of its own. Never destroyed: threads wait in it.
  static ThreadPool& instance() {
    static std::atomic<ThreadPool*> current{nullptr};
    ThreadPool* pool = current.load(std::memory_order_acquire);
    if (pool && pool->generation_ == fork_generation.load(std::memory_order_relaxed)) return *pool;
    auto* fresh = new ThreadPool;
    if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was faster
    return *pool;
  }

  // Calls work(worker, part) for every part below `parts`, on this thread and up to `threads` - 1 others, and returns
  // when all are done. Each worker has a number of its own below `threads`; this thread's is 0. It does all by itself
  // when the others are at work elsewhere, or cannot be started. Rethrows what `work` threw.
  template <class Work>
  void run(int threads, int parts, const Work& work) {
    std::unique_lock<std::mutex> mine(in_use_, std::defer_lock);
    if (threads < 2 || parts < 2 || !mine.try_lock()) {
      for (int part = 0; part < parts; part++) work(0, part);
      return;
    }
    Job job{[](const void* w, int worker, int part) { (*static_cast<const Work*>(w))(worker, part); }, &work, parts,
            std::min(threads, parts)};
    {
      const std::lock_guard guard(mutex_);
      while (threads_ < job.workers - 1 && start_one()) threads_++;
      job_ = &job;
    }
    for (int i = 1; i < job.workers; i++) wake_.notify_one();
    job.help(0);
    std::unique_lock lock(mutex_);
    job_ = nullptr;
    left_.wait(lock, [&] { return job.inside == 0; });
    if (job.error) std::rethrow_exception(job.error);
  }

 private:
  struct Job {
    void (*call)(const void* work, int worker, int part);
    const void* work;
    int parts;
    int workers;     // at most
    int joined = 1;  // guarded by the pool's mutex, as is `inside`
    int inside = 0;
    std::atomic<int> next{0};  // part
    std::atomic<bool> failed{false};
    std::exception_ptr error{};  // whose who set `failed`

    void help(int worker) {
      try {
        for (int part; (part = next.fetch_add(1, std::memory_order_relaxed)) < parts;) call(work, worker, part);
      } catch (...) {
        next.store(parts, std::memory_order_relaxed);
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  };

  bool start_one() {
    pthread_t thread;
    const auto body = [](void* self) -> void* { static_cast<ThreadPool*>(self)->wait_and_help(); };
    const bool started = start_thread(thread, "replay-copies", body, this) == 0;
    if (started) pthread_detach(thread);
    return started;
  }

  [[noreturn]] void wait_and_help() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return job_ && job_->joined < job_->workers; });
      Job& job = *job_;
      const int worker = job.joined++;
      job.inside++;
      lock.unlock();
      job.help(worker);
      lock.lock();
      if (--job.inside == 0) left_.notify_one();
    }
  }

  const uint64_t generation_ = fork_generation.load(std::memory_order_relaxed);
  std::mutex in_use_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, left_;
  Job* job_ = nullptr;
  int threads_ = 0;
};

}  // namespace torchreplay
