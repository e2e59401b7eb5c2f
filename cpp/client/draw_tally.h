// What a process counts of the batches that it draws from a union: ordered, handed out and given up.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

namespace torchreplay {

// What its limiter needs to know. For one thread at a time: it is guarded as all clients are.
struct DrawTally {
  int64_t rule = 0;                // the number of the limiter that it keeps to
  int64_t sampled = 0;             // items that this limiter counts: those ordered, less those given up
  int64_t counted = 0;             // of these, those handed out
  int64_t items = 0, batches = 0;  // handed out under any limiter
  int64_t lease = 0;               // items up to which it may order
  double until = 0;                // when that ends, in seconds of the caller's clock
  int64_t enough = 0;              // up to which it need not ask for more
  int64_t told = 0;                // `sampled`, as it was reported last

  // Keeps to another limiter from now on. What is under way was admitted by the one before.
  void restart(int64_t number) {
    rule = number;
    sampled = counted = lease = enough = told = 0;
    until = 0;
  }
  void grant(int64_t most, double end) {
    lease = most;
    until = end;
    enough = (lease + sampled) / 2;
  }
  bool covers(int64_t n, double now) const { return sampled + n <= lease && now < until; }
  void hand_out(int64_t n, bool is_counted) {
    items += n;
    batches++;
    if (is_counted) counted += n;
  }
};

// Where a stream of random numbers is: each round takes one of its steps.
struct DrawSteps {
  int64_t made = 0;       // batches drawn, those by whom it goes on from, too
  int64_t next = 0;       // the step of the next round
  int64_t under_way = 0;  // rounds that are neither drawn nor given up

  void go_on_from(int64_t step) {
    made = step;
    next = step + under_way;
  }
};

// A batch under way: counted as ordered until it is handed out or given up, once. Nobody holds it: it is given up.
class CountedRound {
 public:
  CountedRound(std::shared_ptr<DrawTally> tally, std::shared_ptr<DrawSteps> steps, int64_t n)
      : tally_(std::move(tally)), steps_(std::move(steps)), n_(n), rule_(tally_->rule) {
    tally_->sampled += n_;
    if (!steps_) return;
    step_ = steps_->next++;
    steps_->under_way++;
  }
  ~CountedRound() { give_up(); }
  CountedRound(const CountedRound&) = delete;

  int64_t items() const { return n_; }
  int64_t step() const { return step_; }

  void hand_out() {
    if (!tally_) return;
    tally_->hand_out(n_, is_counted());
    tally_.reset();
    if (!steps_) return;
    steps_->under_way--;
    steps_->made++;
  }

  void give_up() {
    if (!tally_) return;
    if (is_counted()) tally_->sampled -= n_;
    tally_.reset();
    if (!steps_) return;
    steps_->under_way--;
    if (step_ == steps_->next - 1) steps_->next = step_;  // another one's would be used twice
  }

  // It has only so many items, no more than it was begun with.
  void shorten(int64_t n) {
    if (tally_ && is_counted()) tally_->sampled -= n_ - n;
    n_ = n;
  }

 private:
  bool is_counted() const { return tally_->rule == rule_; }

  std::shared_ptr<DrawTally> tally_;  // nullptr: it is counted no more
  std::shared_ptr<DrawSteps> steps_;
  int64_t n_;
  const int64_t rule_;
  int64_t step_ = -1;
};

}  // namespace torchreplay
