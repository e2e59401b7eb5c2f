// Threads of the native core's own.
#pragma once

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <cstdint>

namespace torchreplay {

// A number of the calling thread's own, from 1 on. No later thread of the process gets it, unlike pthread_self().
inline uint64_t this_thread() {
  static std::atomic<uint64_t> last{0};
  static thread_local uint64_t own = 0;
  if (own == 0) own = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return own;
}

// pthread_create, for a thread that gets no signals: they are for those that know what to do with them. The system
// shows its name, of 15 characters at most.
inline int start_thread(pthread_t& thread, const char* name, void* (*body)(void*), void* self) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int error = pthread_create(&thread, nullptr, body, self);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!error) pthread_setname_np(thread, name);
  return error;
}

}  // namespace torchreplay
