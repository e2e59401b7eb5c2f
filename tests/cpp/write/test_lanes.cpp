#include <array>
#include <boost/test/unit_test.hpp>
#include <ostream>

#include "segments.h"
#include "write/lanes.h"

namespace torchreplay {

static std::ostream& operator<<(std::ostream& to, const StreamRow& r) {
  return to << "{" << static_cast<int>(r.kind) << " lane " << r.lane << " time " << r.time << " obs " << r.obs_time
            << " flags " << r.flags << " answer " << r.answer << "}";
}

static bool operator==(const StreamRow& a, const StreamRow& b) {
  // The values of a reset are its observation alone: its time means nothing.
  return a.kind == b.kind && a.lane == b.lane && a.obs_time == b.obs_time && a.flags == b.flags &&
         a.answer == b.answer && (a.kind == StreamRow::Kind::kReset || a.time == b.time);
}

}  // namespace torchreplay

BOOST_AUTO_TEST_SUITE(test_lanes)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

using Kind = StreamRow::Kind;
using Flags = std::vector<uint8_t>;

// What a row says: the key before it, its step and its flags.
struct Said {
  int64_t prev;
  uint32_t step;
  uint64_t flags;
  bool operator==(const Said&) const = default;
};

std::ostream& operator<<(std::ostream& to, const Said& s) {
  return to << "{after " << s.prev << " step " << s.step << " flags " << s.flags << "}";
}

StreamRow reset(uint32_t lane, int64_t obs_time, int64_t answer) {
  return {Kind::kReset, lane, 0, obs_time, 0, answer};
}
StreamRow step(uint32_t lane, int64_t time, int64_t obs_time, uint64_t flags, int64_t answer) {
  return {Kind::kStep, lane, time, obs_time, flags, answer};
}

void plan_step(Lanes& lanes, const Flags& terminated, const Flags& truncated, bool last_given = false) {
  lanes.plan_steps(1, terminated.data(), truncated.data(), last_given, false);
}

// Writes the planned rows from `first` on, or as many as given, under ascending keys. Returns what they say.
std::vector<Said> write(Lanes& lanes, uint64_t& key, uint64_t first = 0, uint64_t end = ~0ULL) {
  std::vector<Said> said;
  for (uint64_t i = first; i < std::min<uint64_t>(end, lanes.rows().size()); i++) {
    const RowMeta meta = lanes.meta(i, {});
    said.push_back({static_cast<int64_t>(meta.link >> 16) - 1, meta.step, meta.link & 0xffff});
    lanes.commit(i, key++);
  }
  return said;
}

std::string refusal(const std::function<void()>& plan) {
  try {
    plan();
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

const Flags kNone2 = {0, 0}, kNone3 = {0, 0, 0};

}  // namespace

#define CHECK_ROWS(lanes, ...)                                                \
  do {                                                                        \
    const std::vector<StreamRow> expected = {__VA_ARGS__};                    \
    BOOST_TEST((lanes).rows() == expected, boost::test_tools::per_element()); \
  } while (false)
#define CHECK_SAID(got, ...)                                        \
  do {                                                              \
    const std::vector<Said> expected = {__VA_ARGS__}, said = got;   \
    BOOST_TEST(said == expected, boost::test_tools::per_element()); \
  } while (false)

BOOST_AUTO_TEST_CASE(one_stream_goes_from_reset_to_end_to_reset) {
  Lanes lanes(1, false, Autoreset::kNextStep);
  uint64_t key = 7;
  lanes.plan_reset(nullptr);
  CHECK_ROWS(lanes, reset(0, 0, 0));
  CHECK_SAID(write(lanes, key), {-1, 0, kFirst});
  plan_step(lanes, {0}, {0});
  CHECK_ROWS(lanes, step(0, 0, 0, 0, 0));
  CHECK_SAID(write(lanes, key), {7, 1, 0});
  plan_step(lanes, {0}, {1});
  CHECK_SAID(write(lanes, key), {8, 2, kTruncated});
  lanes.plan_reset(nullptr);
  CHECK_SAID(write(lanes, key), {9, 0, kFirst});
  plan_step(lanes, {1}, {1});
  CHECK_SAID(write(lanes, key), {10, 1, kTerminated | kTruncated});
}

BOOST_AUTO_TEST_CASE(a_reset_may_cut_an_episode_short_and_repeat) {
  Lanes lanes(1, false, Autoreset::kNextStep);
  uint64_t key = 0;
  for (int i = 0; i < 3; i++) {
    lanes.plan_reset(nullptr);
    CHECK_SAID(write(lanes, key), {i - 1, 0, kFirst});
  }
}

BOOST_AUTO_TEST_CASE(a_priority_goes_with_steps_and_not_with_resets) {
  Lanes lanes(1, false, Autoreset::kNextStep);
  const RowMeta given{kHasPriority, 0, 2.5F};
  lanes.plan_reset(nullptr);
  BOOST_TEST(lanes.meta(0, given).link == kFirst);
  lanes.commit(0, 0);
  plan_step(lanes, {1}, {0});
  BOOST_TEST(lanes.meta(0, given).link == (uint64_t{1} << 16 | kTerminated | kHasPriority));
  BOOST_TEST(lanes.meta(0, given).priority == 2.5F);
}

BOOST_AUTO_TEST_CASE(steps_before_a_reset_and_after_an_end_are_refused_and_change_nothing) {
  for (bool vectorised : {false, true}) {
    Lanes lanes(2, vectorised, Autoreset::kDisabled);
    uint64_t key = 0;
    const std::string early = refusal([&] { plan_step(lanes, kNone2, kNone2); });
    BOOST_TEST(has(early, "step() before the first reset()"));
    BOOST_TEST(has(early, "environment 0") == vectorised);
    lanes.plan_reset(nullptr);
    write(lanes, key);
    plan_step(lanes, {0, 1}, kNone2);
    write(lanes, key);
    const std::string late = refusal([&] { plan_step(lanes, kNone2, kNone2); });
    BOOST_TEST(has(late, "call reset() first"));
    BOOST_TEST(has(late, "environment 1") == vectorised);
    const uint8_t second[] = {0, 1};
    lanes.plan_reset(second);
    CHECK_ROWS(lanes, reset(1, 0, 1));
    CHECK_SAID(write(lanes, key), {3, 0, kFirst});
    plan_step(lanes, kNone2, kNone2);
    CHECK_SAID(write(lanes, key), {2, 2, 0}, {4, 1, 0});
  }
}

BOOST_AUTO_TEST_CASE(an_empty_mask_resets_no_lane) {
  Lanes lanes(3, true, Autoreset::kDisabled);
  lanes.plan_reset(kNone3.data());
  BOOST_TEST(lanes.rows().empty());
  BOOST_TEST(has(refusal([&] { plan_step(lanes, kNone3, kNone3); }), "before the first reset"));
}

// Gymnasium's NEXT_STEP: the step after an end ignores the action and brings the new episode's first observation.
BOOST_AUTO_TEST_CASE(in_next_step_mode_the_step_after_an_end_is_a_reset) {
  Lanes lanes(3, true, Autoreset::kNextStep);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);  // 0, 1, 2
  plan_step(lanes, {0, 1, 0}, {0, 0, 1});
  CHECK_ROWS(lanes, step(0, 0, 0, 0, 0), step(1, 0, 0, kTerminated, 1), step(2, 0, 0, kTruncated, 2));
  CHECK_SAID(write(lanes, key), {0, 1, 0}, {1, 1, kTerminated}, {2, 1, kTruncated});
  plan_step(lanes, {1, 0, 0}, kNone3);
  CHECK_ROWS(lanes, step(0, 0, 0, kTerminated, 0), reset(1, 0, 1), reset(2, 0, 2));
  CHECK_SAID(write(lanes, key), {3, 2, kTerminated}, {4, 0, kFirst}, {5, 0, kFirst});
  plan_step(lanes, kNone3, kNone3);
  CHECK_SAID(write(lanes, key), {6, 0, kFirst}, {7, 1, 0}, {8, 1, 0});
}

// Gymnasium never sets them. An environment that resets otherwise does, and would lose a step of every episode.
BOOST_AUTO_TEST_CASE(in_next_step_mode_a_flag_of_the_step_after_an_end_is_refused_and_changes_nothing) {
  for (bool truncated : {false, true}) {
    Lanes lanes(2, true, Autoreset::kNextStep);
    uint64_t key = 0;
    lanes.plan_reset(nullptr);
    write(lanes, key);  // 0, 1
    plan_step(lanes, {0, 1}, kNone2);
    write(lanes, key);  // 2, 3
    const Flags second = {0, 1};
    const std::string text =
        refusal([&] { plan_step(lanes, truncated ? kNone2 : second, truncated ? second : kNone2); });
    BOOST_TEST(has(text, "environment 1"));
    BOOST_TEST(has(text, "buffer.writer(envs)"));
    plan_step(lanes, {1, 0}, kNone2);
    CHECK_SAID(write(lanes, key), {2, 2, kTerminated}, {3, 0, kFirst});
  }
}

BOOST_AUTO_TEST_CASE(rows_that_begin_an_episode_name_the_step_they_are_made_of) {
  Lanes lanes(2, true, Autoreset::kNextStep);
  lanes.plan_steps(3, Flags{0, 0, 1, 0, 0, 0}.data(), Flags{0, 0, 0, 0, 0, 0}.data(), false, true);
  std::vector<int64_t> times;
  for (const StreamRow& row : lanes.rows())
    if (row.kind == Kind::kReset) times.push_back(row.time);
  BOOST_TEST(times == (std::vector<int64_t>{-1, -1, 2}), boost::test_tools::per_element());
  BOOST_TEST(lanes.begins_after_end());
  lanes.plan_reset(nullptr);
  BOOST_TEST(!lanes.begins_after_end());
}

// SAME_STEP: the observation of a lane that ends is already the next episode's; the last one comes in final_obs.
BOOST_AUTO_TEST_CASE(in_same_step_mode_an_end_writes_the_last_row_and_a_reset) {
  Lanes lanes(2, true, Autoreset::kSameStep);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);  // 0, 1
  BOOST_TEST(has(refusal([&] { plan_step(lanes, {0, 1}, kNone2); }), "final_obs"));
  plan_step(lanes, {1, 0}, {1, 0}, true);
  CHECK_ROWS(lanes, {Kind::kLast, 0, 0, 0, kTerminated | kTruncated, 0}, reset(0, 0, -1), step(1, 0, 0, 0, 1));
  CHECK_SAID(write(lanes, key), {0, 1, kTerminated | kTruncated}, {2, 0, kFirst}, {1, 1, 0});
  plan_step(lanes, kNone2, kNone2);  // needs no final_obs
  CHECK_SAID(write(lanes, key), {3, 1, 0}, {4, 2, 0});
  plan_step(lanes, kNone2, {1, 1}, true);
  CHECK_SAID(write(lanes, key), {5, 2, kTruncated}, {7, 0, kFirst}, {6, 3, kTruncated}, {9, 0, kFirst});
}

BOOST_AUTO_TEST_CASE(a_refused_lane_leaves_the_others_where_they_were) {
  Lanes lanes(3, true, Autoreset::kSameStep);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);
  refusal([&] { plan_step(lanes, {0, 0, 1}, kNone3); });
  plan_step(lanes, kNone3, kNone3);
  CHECK_SAID(write(lanes, key), {0, 1, 0}, {1, 1, 0}, {2, 1, 0});
}

BOOST_AUTO_TEST_CASE(a_whole_episode_is_a_reset_and_its_steps) {
  Lanes lanes(1, false, Autoreset::kNextStep);
  uint64_t key = 0;
  for (int64_t before : {-1, 3}) {
    lanes.plan_steps(3, Flags{0, 0, 1}.data(), Flags{0, 0, 0}.data(), false, true);
    CHECK_ROWS(lanes, reset(0, 0, 0), step(0, 0, 1, 0, 1), step(0, 1, 2, 0, 2), step(0, 2, 3, kTerminated, 3));
    const int64_t first = static_cast<int64_t>(key);
    CHECK_SAID(write(lanes, key), {before, 0, kFirst}, {first, 1, 0}, {first + 1, 2, 0}, {first + 2, 3, kTerminated});
  }
}

BOOST_AUTO_TEST_CASE(an_episode_that_ends_before_its_last_step_is_refused) {
  Lanes lanes(1, false, Autoreset::kNextStep);
  const std::string text =
      refusal([&] { lanes.plan_steps(3, Flags{0, 1, 0}.data(), Flags{0, 0, 0}.data(), false, true); });
  BOOST_TEST(has(text, "ends at step 1 of 3"));
  BOOST_TEST(has(refusal([&] { plan_step(lanes, {0}, {0}); }), "before the first reset"));
}

BOOST_AUTO_TEST_CASE(an_episode_without_steps_is_a_reset) {
  Lanes lanes(1, false, Autoreset::kNextStep);
  lanes.plan_steps(0, nullptr, nullptr, false, true);
  CHECK_ROWS(lanes, reset(0, 0, 0));
}

// The same rows as a reset of all lanes and a step for each time.
BOOST_AUTO_TEST_CASE(a_block_of_times_and_lanes_goes_on_after_ends_like_single_steps) {
  const Flags terminated = {0, 1, 0, 0, 0, 0, 1, 0}, truncated = {0, 0, 1, 0, 0, 0, 0, 0};  // [4, 2]
  Lanes block(2, true, Autoreset::kNextStep), single(2, true, Autoreset::kNextStep);
  uint64_t key = 0, single_key = 0;
  block.plan_steps(4, terminated.data(), truncated.data(), false, true);
  CHECK_ROWS(block, reset(0, 0, 0), reset(1, 0, 1), step(0, 0, 1, 0, 2), step(1, 0, 1, kTerminated, 3),
             step(0, 1, 2, kTruncated, 4), reset(1, 2, 5), reset(0, 3, 6), step(1, 2, 3, 0, 7),
             step(0, 3, 4, kTerminated, 8), step(1, 3, 4, 0, 9));
  const std::vector<Said> said = write(block, key);
  single.plan_reset(nullptr);
  std::vector<Said> singly = write(single, single_key);
  for (int t = 0; t < 4; t++) {
    single.plan_steps(1, terminated.data() + 2 * t, truncated.data() + 2 * t, false, false);
    for (const Said& s : write(single, single_key)) singly.push_back(s);
  }
  BOOST_TEST(said == singly, boost::test_tools::per_element());
}

// A call that Ctrl-C or the limiter ends between two rows: the caller cannot know which are there.
BOOST_AUTO_TEST_CASE(a_call_that_fails_when_some_of_its_rows_are_written_leaves_its_lanes_to_be_reset) {
  Lanes lanes(3, true, Autoreset::kNextStep);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);
  plan_step(lanes, {0, 1, 1}, kNone3);
  write(lanes, key, 0, 2);  // 3, 4: lane 2 writes nothing
  lanes.break_off();
  for (uint8_t lane = 0; lane < 3; lane++) {
    BOOST_TEST(
        has(refusal([&] { plan_step(lanes, kNone3, kNone3); }), "call reset() before the next step() in environment"));
    Flags one(3);
    one[lane] = 1;
    lanes.plan_reset(one.data());
    CHECK_SAID(write(lanes, key), {std::array{3, 4, 2}[lane], 0, kFirst});  // windows across episodes may run on
  }
  plan_step(lanes, kNone3, kNone3);
  CHECK_SAID(write(lanes, key), {5, 1, 0}, {6, 1, 0}, {7, 1, 0});
}

BOOST_AUTO_TEST_CASE(a_reset_of_some_lanes_that_fails_half_way_leaves_the_others_in_their_episodes) {
  Lanes lanes(3, true, Autoreset::kDisabled);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);
  const uint8_t some[] = {0, 1, 1};
  lanes.plan_reset(some);
  write(lanes, key, 0, 1);
  lanes.break_off();
  lanes.plan_reset(some);
  write(lanes, key);
  plan_step(lanes, kNone3, kNone3);
  CHECK_SAID(write(lanes, key), {0, 1, 0}, {4, 1, 0}, {5, 1, 0});
}

BOOST_AUTO_TEST_CASE(a_call_that_fails_before_its_first_row_may_be_made_again_and_after_its_last_one_is_done) {
  for (const uint64_t written : {0, 2}) {
    Lanes lanes(2, true, Autoreset::kNextStep);
    uint64_t key = 0;
    lanes.plan_reset(nullptr);
    write(lanes, key);
    plan_step(lanes, kNone2, kNone2);
    write(lanes, key, 0, written);
    lanes.break_off();
    plan_step(lanes, kNone2, kNone2);
    const auto before = static_cast<int64_t>(written);
    const auto step = static_cast<uint32_t>(1 + written / 2);
    CHECK_SAID(write(lanes, key), {before, step, 0}, {before + 1, step, 0});
  }
}

BOOST_AUTO_TEST_CASE(a_lane_stopped_between_its_last_row_and_its_reset_has_to_be_reset) {
  Lanes lanes(1, true, Autoreset::kSameStep);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);
  plan_step(lanes, {1}, {0}, true);
  write(lanes, key, 0, 1);
  lanes.break_off();
  BOOST_TEST(has(refusal([&] { plan_step(lanes, {0}, {0}); }), "call reset()"));
  lanes.plan_reset(nullptr);
  CHECK_SAID(write(lanes, key), {1, 0, kFirst});
}

BOOST_AUTO_TEST_CASE(a_plan_half_written_goes_on_with_the_row_it_had_come_to) {
  Lanes lanes(2, true, Autoreset::kSameStep);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);
  plan_step(lanes, {1, 1}, kNone2, true);
  CHECK_SAID(write(lanes, key, 0, 1), {0, 1, kTerminated});
  CHECK_SAID(write(lanes, key, 1), {2, 0, kFirst}, {1, 1, kTerminated}, {4, 0, kFirst});
}

BOOST_AUTO_TEST_CASE(after_a_fork_every_lane_starts_anew) {
  Lanes lanes(2, true, Autoreset::kNextStep);
  uint64_t key = 0;
  lanes.plan_reset(nullptr);
  write(lanes, key);
  lanes.forget();
  BOOST_TEST(has(refusal([&] { plan_step(lanes, kNone2, kNone2); }), "before the first reset"));
  lanes.plan_reset(nullptr);
  CHECK_SAID(write(lanes, key), {-1, 0, kFirst}, {-1, 0, kFirst});
}

// The ring asks for a row's header when it is about to be written and passes its key, also where slots are skipped.
BOOST_AUTO_TEST_CASE(rows_in_the_ring_name_the_keys_that_their_predecessors_got) {
  struct Rows {
    Lanes& lanes;
    RowMeta meta(uint64_t i) const { return lanes.meta(i, {}); }
    void commit(uint64_t i, uint64_t key) const { lanes.commit(i, key); }
  };
  Plan plan;
  plan.capacity = 16;
  plan.view = {.span = 1};
  auto m = make_segment(plan);
  SteppedWriter slow(*m, 2);
  m->header().head.store(3);
  slow.take_ticket();
  slow.seize();  // slot 3
  m->header().head.store(18);
  Lanes lanes(2, true, Autoreset::kNextStep);
  lanes.plan_steps(2, Flags{0, 0, 0, 1}.data(), Flags{0, 0, 0, 0}.data(), false, true);
  std::vector<int64_t> keys(6);
  uint64_t written = 0;
  BOOST_TEST(
      (RingWriter(*m, 1).append(6, Rows{lanes}, keys.data(), written, [](uint64_t, uint64_t) {}) == Append::kDone));
  BOOST_TEST(keys == (std::vector<int64_t>{18, 20, 21, 22, 23, 24}), boost::test_tools::per_element());
  const Said expected[] = {{-1, 0, kFirst}, {-1, 0, kFirst}, {18, 1, 0}, {20, 1, 0}, {21, 2, 0}, {22, 2, kTerminated}};
  for (int i = 0; i < 6; i++) {
    const RowHeader& row = m->row(m->slot_of(static_cast<uint64_t>(keys[i])));
    const Said said{static_cast<int64_t>(row.link.load() >> 16) - 1, row.step.load(), row.link.load() & 0xffff};
    BOOST_TEST(said == expected[i]);
  }
}

BOOST_AUTO_TEST_SUITE_END()
