// Explorers that lag and die at random, each with several streams.
#pragma once

#include <random>

#include "complete_items.h"
#include "explorers.h"

namespace torchreplay::testing {

class Crowd {
 public:
  Crowd(SegmentMemory& m, int explorers, unsigned seed) : memory_(m), random_(seed), written_(m.layout().view) {
    for (int w = 0; w < explorers; w++) {
      members_.push_back({Explorer(m, w + 1), kIdle, {}});
      members_.back().streams.resize(1 + random_() % 3);
    }
    // Some crowds have long episodes, in some these end nearly always.
    end_every_ = 1 + random_() % 20;
    reset_every_ = 2 + random_() % 60;
  }

  // One of them goes a step further, or, now and then, dies.
  void move() {
    Member& member = members_[random_() % members_.size()];
    random_() % 24 ? advance(member) : die(member);
  }

  // All finish what they are at, or die.
  void quiesce() {
    for (Member& member : members_) {
      while (random_() % 2 && member.state != kIdle) advance(member);
      die(member);
    }
  }

  // Every row that ever was.
  const RowSet& written() const { return written_; }

 private:
  enum State { kIdle, kTicket, kBusy };
  struct Member {
    Explorer explorer;
    State state;
    std::vector<Stream> streams;
  };

  void advance(Member& member) {
    SteppedWriter& writer = member.explorer.writer();
    if (member.state == kIdle) {
      writer.take_ticket();
      member.state = kTicket;
    } else if (member.state == kTicket) {
      member.state = writer.seize() ? kBusy : kIdle;
    } else {
      write(member.explorer, member.streams[random_() % member.streams.size()]);
      member.state = kIdle;
    }
  }

  void write(Explorer& explorer, Stream& stream) {
    RowMeta meta = stream.reset();
    if (stream.running && random_() % reset_every_ != 0) {
      const uint64_t flags = random_() % end_every_ == 0 ? (1 + random_() % 3) * kTerminated : 0;
      std::optional<float> given;
      if (random_() % 3 == 0) given = std::pow(2.0F, static_cast<float>(random_() % 100) / 10 - 5);
      meta = stream.next(flags, given);
    }
    written_.add(explorer.writer().key(), {meta.link, meta.step, meta.priority});
    explorer.finish(meta);
    stream.wrote(explorer.writer().key(), meta);
  }

  // A ticket lost before its slot was busy stays lost; a slot left busy is freed. The next process with this id has
  // streams of its own.
  void die(Member& member) {
    reclaim(memory_, member.explorer.writer().id());
    member.state = kIdle;
    for (Stream& s : member.streams) s = {};
  }

  SegmentMemory& memory_;
  std::mt19937_64 random_;
  std::vector<Member> members_;
  RowSet written_;
  uint64_t end_every_, reset_every_;
};

}  // namespace torchreplay::testing
