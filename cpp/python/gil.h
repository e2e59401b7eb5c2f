// The interpreter lock, and the threads that ask for it when the interpreter comes to its end.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <thread>

#include "client/wait.h"

namespace torchreplay::py {

// Once the interpreter comes to its end no thread but its own gets the interpreter lock. Python before 3.14 unwinds the
// others, through destructors that must not throw and that need the lock. Here they sleep, as in later ones, until the
// process is gone.
[[noreturn]] inline void sleep_until_gone() {
  for (;;) pause();
}

// Runs what takes the interpreter lock.
template <class Take>
decltype(auto) taking_gil(Take&& take) {
  try {
    return take();
  } catch (...) {  // neither Python nor C throws anything else
    sleep_until_gone();
  }
}

// The interpreter lock guards the clients of this process: `Unlocked` releases it.
inline void guard_clients_by_gil() {
  caller_lock = {
      [] { return static_cast<void*>(PyEval_SaveThread()); },
      [](void* state) { taking_gil([state] { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }); }};
}

// Torch releases the lock, too, for each tensor that is dropped. Unwinding through a frame of torch's that must not
// throw ends the process. From now on, when the interpreter is about to end, the thread sleeps instead.
inline void let_threads_sleep_at_the_end() {
  static std::thread::id ending;
  static std::terminate_handler before = nullptr;
  ending = std::this_thread::get_id();
  if (before) return;
  before = std::get_terminate();
  std::set_terminate([] {
    if (std::this_thread::get_id() != ending && !std::current_exception()) sleep_until_gone();
    before();
    std::abort();
  });
}

}  // namespace torchreplay::py
