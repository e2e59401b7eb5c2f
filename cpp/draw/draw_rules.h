// What a draw may do, and how it can end.
#pragma once

#include <cstdint>
#include <vector>

#include "segment/header.h"

namespace torchreplay {

enum class Draw {
  kDone,
  kWait,       // the limiter wants more items, or none can be drawn yet
  kBarren,     // whole turns of rows completed no item: waiting is in vain, unless they were not looked at
  kStopped,    // the buffer was
  kLapped,     // the ring turns faster than a batch is copied
  kEpochEnds,  // the next epoch may not begin yet
  kEpochOver,  // nor ever: it was the last
};

// What a waiting learner has to know.
struct Shortage {
  uint64_t inserted = 0, needed = 0, drawable = 0;
  uint32_t seen = 0;  // rows_signal before the draw looked: what it sleeps on
};

// A draw of whole groups from a queue of single rows: what it is of, and what became of it.
struct GroupDraw {
  uint32_t field = 0;       // int64, whose value the members of a group share
  int size = 1;             // members of a whole group
  int groups = 1;           // of a batch
  int min_size = 0;         // members with which a late group comes as well; 0: it does not
  int64_t timeout_ms = -1;  // a group is late when its first member came so long ago; -1: none is
  bool last = false;        // nobody writes any more: a batch may have fewer groups, and each is as if it was late

  std::vector<int64_t> sizes = {};  // of the groups of the batch
  uint64_t dropped = 0, dropped_items = 0;
};

// Of a draw without replacement: with a last epoch its batches end with epochs, shorter than others; else they go on
// into the next one. Of a queue: a batch may be shorter than asked for.
struct DrawRules {
  uint64_t last_epoch = kNever;  // by number
  bool may_begin_epoch = true;
  int at_least = 0;                      // items; 0: all that are asked for
  std::vector<int64_t>* done = nullptr;  // keys of items that the drawing process is done with; emptied when they are
  GroupDraw* groups = nullptr;           // of a queue: whole groups; nullptr: items
};

}  // namespace torchreplay
