// What ThreadSanitizer needs to see the tests' locks.
#pragma once

#ifdef TORCHREPLAY_RACEFREE
#include <pthread.h>
#include <sched.h>

#include <cerrno>
#include <ctime>

// ThreadSanitizer of GCC 12 does not follow pthread_mutex_clocklock(), and would take a mutex locked by it for one that
// is not locked. It does follow pthread_mutex_trylock().
extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* until) noexcept {
  for (;;) {
    const int r = pthread_mutex_trylock(mutex);
    if (r != EBUSY) return r;
    timespec now;
    clock_gettime(clock, &now);
    if (now.tv_sec > until->tv_sec || (now.tv_sec == until->tv_sec && now.tv_nsec >= until->tv_nsec)) return ETIMEDOUT;
    sched_yield();
  }
}
#endif
