// Marking derived state while it is being changed.
#pragma once

#include <exception>

#include "segment/segment_memory.h"
#include "system/fault.h"

namespace torchreplay {

// Marks that derived state is being changed, so that the next owner after a death knows what to rebuild.
class DirtyScope {
 public:
  DirtyScope(Header& h, Dirty what) : header_(h), exceptions_(std::uncaught_exceptions()) {
    h.dirty = what;
    kill_fence();
    TORCHREPLAY_FAULT("dirty.set");
  }
  ~DirtyScope() {
    if (std::uncaught_exceptions() > exceptions_) return;  // left half done: the next owner of the lock repairs it
    TORCHREPLAY_FAULT("dirty.over");
    kill_fence();
    header_.dirty = Dirty::kClean;
    TORCHREPLAY_FAULT("dirty.clean");
  }
  DirtyScope(const DirtyScope&) = delete;

 private:
  Header& header_;
  int exceptions_;
};

}  // namespace torchreplay
