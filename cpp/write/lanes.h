// The episodes that one writer is in the middle of: which rows a call of `reset` or `step` writes, and how they are
// linked.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "write/ring_writer.h"

namespace torchreplay {

// What happens to a lane whose episode has ended, as Gymnasium's vector environments name it.
enum class Autoreset : uint32_t {
  kNextStep,  // the next step's observation is the new episode's first one
  kSameStep,  // the step brings both the episode's last observation and the next one's first
  kDisabled,  // the user resets the lane
};

// A call's values have a time and a lane.
struct StreamRow {
  enum class Kind : uint8_t {
    kReset,  // an observation only
    kStep,
    kLast,  // a step whose observation is given apart: the one that ended the episode
  };
  Kind kind;
  uint32_t lane;
  int64_t time, obs_time;  // a reset's time is that of the step it is made of; -1: of none
  uint64_t flags;
  int64_t answer;  // the call returns this row's key at that place; -1: it does not
};

class Lanes {
 public:
  // `vectorised`: the caller's values have a dimension of lanes. `reset`: the call of it, for messages.
  Lanes(uint32_t n, bool vectorised, Autoreset autoreset, const View& view = {}, std::string reset = "reset()")
      : lanes_(n), vectorised_(vectorised), autoreset_(autoreset), view_(view), reset_(std::move(reset)) {}

  uint32_t size() const { return static_cast<uint32_t>(lanes_.size()); }
  bool vectorised() const { return vectorised_; }
  const std::vector<StreamRow>& rows() const { return rows_; }
  // Whether a planned row begins an episode and is made of the step after an end.
  bool begins_after_end() const { return begins_after_end_; }

  // Whether no planned row is written.
  bool untouched() const { return committed_ == 0; }

  // The call has failed. If a part of the planned rows is written, nobody knows which. The same call again would write
  // them twice, and the next call would skip the missing ones. So their lanes start with a reset.
  void break_off() {
    if (committed_ == 0 || committed_ == rows_.size()) return;
    for (const StreamRow& row : rows_) lanes_[row.lane].state = State::kBroken;
  }

  // Resets wait for room, which the episodes before them take up that were not written to their end. These are over
  // from now on. If the call fails, too, their lanes start with a reset. Returns the keys of their last rows.
  std::vector<int64_t> drop_before_resets() {
    std::vector<int64_t> keys;
    std::vector<bool> looked(lanes_.size());
    for (uint64_t i = committed_; i < rows_.size() && !view_.across; i++) {
      const StreamRow& row = rows_[i];
      Lane& lane = lanes_[row.lane];
      if (looked[row.lane]) continue;
      looked[row.lane] = true;
      if (row.kind != StreamRow::Kind::kReset || lane.state != State::kRunning) continue;
      lane.state = State::kDropped;
      keys.push_back(static_cast<int64_t>(lane.key1 - 1));
    }
    return keys;
  }

  // The plan is needed no more, and was a large one.
  void forget_plan() { std::vector<StreamRow>().swap(rows_); }

  // Rows so far with which an item was complete.
  uint64_t completed() const { return completed_; }

  // A forked child owns no stream of its parent's: it starts with a reset.
  void forget() {
    for (Lane& lane : lanes_) lane = {};
  }

  // Plans a first row in every lane; those where `mask` (nullptr: none) is 0 are left out.
  void plan_reset(const uint8_t* mask) {
    begin();
    for (uint32_t i = 0; i < size(); i++)
      if (!mask || mask[i]) add_reset(i, 0, i);
  }

  // Plans `times` steps of every lane, from their flags [times, lanes]. `last_given`: of the lanes that end, the last
  // observation is given apart. With `from_reset` the first observation, at obs_time 0, starts an episode in every
  // lane. Throws std::invalid_argument, and changes nothing, when a lane cannot take a step, or when one that begins an
  // episode in kNextStep mode has a flag.
  void plan_steps(int64_t times, const uint8_t* terminated, const uint8_t* truncated, bool last_given,
                  bool from_reset) {
    begin();
    if (from_reset)
      for (uint32_t i = 0; i < size(); i++) add_reset(i, 0, i);
    const int64_t shift = from_reset ? 1 : 0;
    for (int64_t time = 0; time < times; time++)
      for (uint32_t i = 0; i < size(); i++) {
        const int64_t at = time * size() + i;
        const uint64_t flags = (terminated[at] ? kTerminated : 0) | (truncated[at] ? kTruncated : 0);
        add_step(i, time, time + shift, flags, at + shift * size(), last_given, times);
      }
  }

  // Whether an episode is under way in a lane where `but` is 0 (nullptr: in any lane).
  bool running(const uint8_t* but = nullptr) const {
    for (uint32_t i = 0; i < size(); i++)
      if (lanes_[i].state == State::kRunning && !(but && but[i])) return true;
    return false;
  }

  // The keys of the last rows of the episodes that are under way in the lanes where `mask` is set (nullptr: in all).
  // Those without a step yet do not count.
  std::vector<int64_t> last_keys(const uint8_t* mask) const {
    std::vector<int64_t> keys;
    for (uint32_t i = 0; i < size(); i++)
      if (can_end(i, mask)) keys.push_back(static_cast<int64_t>(lanes_[i].key1 - 1));
    return keys;
  }
  // These episodes have ended.
  void end_running(const uint8_t* mask) {
    for (uint32_t i = 0; i < size(); i++)
      if (can_end(i, mask)) {
        lanes_[i].state = State::kEnded;
        completed_ += lanes_[i].step >= view_.min_steps;
      }
  }

  // The header of row `i` of the plan, once the rows before it are committed.
  RowMeta meta(uint64_t i, const RowMeta& priority) const {
    const StreamRow& row = rows_[i];
    const Lane& lane = lanes_[row.lane];
    if (row.kind == StreamRow::Kind::kReset) return {lane.key1 << 16 | kFirst, 0, 0};
    return {lane.key1 << 16 | row.flags | priority.link, view_.step_after(lane.step), priority.priority};
  }

  // Row `i` has been written: the lane goes on from there.
  void commit(uint64_t i, uint64_t key) {
    const StreamRow& row = rows_[i];
    Lane& lane = lanes_[row.lane];
    const bool first = row.kind == StreamRow::Kind::kReset, ends = !first && (row.flags & kEnds);
    lane = {key + 1, first ? 0 : view_.step_after(lane.step), lane.rows + (lane.rows <= view_.span),
            ends ? State::kEnded : State::kRunning};
    const bool whole = lane.step >= view_.span || (ends && lane.step >= view_.min_steps);
    completed_ += view_.across ? lane.rows > view_.span : !first && whole;
    committed_ = i + 1;
  }

 private:
  static constexpr const char* kOneByOne =
      "pass every episode by itself, T steps with T + 1 observations. Only in a block [T + 1, num_envs, ...] do steps "
      "follow an end: the first of them is not taken, and brings the next episode's first observation. "
      "tr.episodes_from_flat cuts flat arrays, such as D4RL's, into episodes";

  enum class State : uint8_t { kNew, kRunning, kEnded, kBroken, kDropped };
  struct Lane {
    uint64_t key1 = 0;  // key + 1 of its last row
    uint32_t step = 0;
    uint64_t rows = 0;  // of the stream, as far as an item needs them
    State state = State::kNew;
  };

  bool can_end(uint32_t lane, const uint8_t* mask) const {
    return (!mask || mask[lane]) && lanes_[lane].state == State::kRunning && lanes_[lane].step > 0;
  }

  void begin() {
    rows_.clear();
    committed_ = 0;
    begins_after_end_ = false;
    planned_.resize(lanes_.size());
    for (size_t i = 0; i < lanes_.size(); i++) planned_[i] = lanes_[i].state;
  }

  void add_reset(uint32_t lane, int64_t obs_time, int64_t answer, int64_t time = -1) {
    rows_.push_back({StreamRow::Kind::kReset, lane, time, obs_time, 0, answer});
    planned_[lane] = State::kRunning;
  }

  void add_step(uint32_t lane, int64_t time, int64_t obs_time, uint64_t flags, int64_t answer, bool last_given,
                int64_t times) {
    State& state = planned_[lane];
    if (state == State::kNew)
      throw std::invalid_argument("step() before the first reset()" + of(lane) +
                                  ": write the episode's first observation by " + reset_);
    if (state == State::kDropped)
      throw std::invalid_argument("the call before failed when it had dropped the episode: call " + reset_ +
                                  " before the next step()" + of(lane));
    if (state == State::kBroken)
      throw std::invalid_argument("the call before failed when some of its rows were written: call " + reset_ +
                                  " before the next step()" + of(lane));
    if (state == State::kEnded) {
      if (vectorised_ && autoreset_ == Autoreset::kNextStep) {
        if (flags) refuse_end_of_reset(lane, time, times);
        begins_after_end_ = true;
        return add_reset(lane, obs_time, answer, time);
      }
      throw std::invalid_argument(times > 1 ? "an episode ends at step " + std::to_string(time - 1) + " of " +
                                                  std::to_string(times) + of(lane) + ": " + kOneByOne
                                            : "step() after the end of the episode" + of(lane) + ": call " + reset_ +
                                                  " first");
    }
    const bool resets = flags && vectorised_ && autoreset_ == Autoreset::kSameStep;
    if (resets && !last_given)
      throw std::invalid_argument("the episode ends" + of(lane) + " and autoreset is 'same_step': " +
                                  (obs_time == time ? "pass final_obs=infos['final_obs'] too"
                                                    : "extend() takes streams of 'next_step' only, use step()"));
    rows_.push_back({resets ? StreamRow::Kind::kLast : StreamRow::Kind::kStep, lane, time, obs_time, flags, answer});
    state = flags ? State::kEnded : State::kRunning;
    if (resets) add_reset(lane, obs_time, -1);
  }

  // An environment that resets in another way, or episodes of a data set that follow each other.
  [[noreturn]] void refuse_end_of_reset(uint32_t lane, int64_t time, int64_t times) const {
    const std::string step = times > 1 ? "step " + std::to_string(time) + " of " + std::to_string(times) : "the step";
    throw std::invalid_argument(
        step + of(lane) + " follows an end and brings a set flag itself. Under autoreset 'next_step' it brings the " +
        "next episode's first observation, and its flags are unset: " +
        (times > 1 ? kOneByOne
                   : "the environment resets in another way; buffer.writer(envs) knows which, or say autoreset="));
  }

  std::string of(uint32_t lane) const { return vectorised_ ? " in environment " + std::to_string(lane) : ""; }

  std::vector<Lane> lanes_;
  bool vectorised_;
  Autoreset autoreset_;
  View view_;
  std::string reset_;
  std::vector<StreamRow> rows_;
  uint64_t committed_ = 0;  // of them
  uint64_t completed_ = 0;
  bool begins_after_end_ = false;
  std::vector<State> planned_;
};

}  // namespace torchreplay
