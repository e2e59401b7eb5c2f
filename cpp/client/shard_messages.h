// What a learner and the shards on other nodes say to each other.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "client/segment_stats.h"
#include "draw/batch_sampler.h"
#include "wire/link.h"

namespace torchreplay {

// Above these low bits of a key of the union is the number of its shard.
inline constexpr int kShardKeyBits = 48;

// With which a request begins: so many candidates are wanted, and the largest raw priority that was seen in any shard.
// Or, where that is NaN, so many keys and TD errors follow.
struct ShardRequest {
  char mark[4];
  uint32_t items;
  double largest;

  ShardRequest(uint32_t n, double seen) : items(n), largest(seen) { std::memcpy(mark, kMark, sizeof kMark); }
  std::string bytes() const { return {reinterpret_cast<const char*>(this), sizeof *this}; }
};
static_assert(sizeof(ShardRequest) == 16);

// With what the head of an answer to a draw begins, behind the start of each answer.
struct DrawnThere {
  double total;
  int64_t drawable;
  double smallest, beta;
  int64_t given;

  // Whether a tree can be so.
  bool is_sound() const { return std::isfinite(total) && total >= 0 && drawable >= 0 && given >= 0; }
};

inline DrawnThere read_drawn(const char* head) {
  DrawnThere there;
  std::memcpy(&there, head, sizeof there);
  return there;
}
inline DrawnFrom drawn_there(const char* head) {
  const DrawnThere there = read_drawn(head);
  return {there.total, there.smallest, there.drawable, 0};
}

// The head of an answer to a draw, behind the start of each answer: DrawnThere, the fields of torchreplay.Stats,
// writers, seconds since one left, and the moment. Each takes eight bytes.
struct ShardHead {
  static size_t bytes() { return sizeof(DrawnThere) + 8 * figure_count() + sizeof(int64_t) + 2 * sizeof(double); }
  // Where a figure is in it.
  static size_t place(std::string_view figure) { return sizeof(DrawnThere) + 8 * figure_place(figure); }

  template <class Value>
  static Value read(const char* head, size_t at) {
    Value value;
    std::memcpy(&value, head + at, sizeof value);
    return value;
  }

  // `moment`: seconds by the clock of this machine.
  static void write(std::string& to, const DrawnThere& drawn, const SegmentStats& stats, double moment) {
    to.append(reinterpret_cast<const char*>(&drawn), sizeof drawn);
    each_figure(stats, [&]<Literal name>(Figure<name>, const auto& value) { put(to, value); });
    put(to, stats.census.writers);
    put(to, ago(stats.census.last_departure, stats.now));
    put(to, moment);
  }

 private:
  template <class Value>
  static void put(std::string& to, Value value) {
    std::conditional_t<std::is_floating_point_v<Value>, double, int64_t> wide{};
    wide = static_cast<decltype(wide)>(value);
    to.append(reinterpret_cast<const char*>(&wide), sizeof wide);
  }
};

}  // namespace torchreplay
