#include <boost/test/unit_test.hpp>

#include "explorers.h"
#include "ragged.h"
#include "traced.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_page_recovery)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr int kWriter = 1, kSlow = 2;

bool is_drawable(const SegmentMemory& m, uint64_t slot) { return m.tree().leaf(static_cast<int64_t>(slot)) > 0; }

// Rows settled, rows to adopt, a row whose pages are gone, one whose writer lags, a lost run, and a busy one.
std::unique_ptr<SegmentMemory> eventful(const View& view) {
  Plan plan = ragged_plan(12, 24 * 64);
  plan.view = view;
  auto m = make_segment(plan);
  if (m->layout().pages.bytes != 64) throw std::runtime_error("pages of another size than expected");
  Stream stream;
  const auto write = [&](uint32_t bytes) {
    const RowMeta meta = !view.linked() ? RowMeta{} : stream.running ? stream.next() : stream.reset();
    append_bytes(*m, kWriter, bytes, meta);
    stream.wrote(m->header().head.load() - 1, meta);
  };
  for (uint32_t bytes : {128, 0, 128, 192, 256, 128, 0, 192}) write(bytes);
  settle(*m);
  for (uint64_t number = 3; number < 5; number++) {  // they never come to their rows
    SteppedRun run(*m, kSlow, number, 30);
    for (int i = 0; i < 5; i++) run.advance();
    if (number == 3) reclaim(*m, kSlow);
  }
  for (uint32_t bytes : {64, 128, 0, 256, 192, 64}) write(bytes);
  return m;
}

std::string nothing(SegmentMemory&) { return ""; }

}  // namespace

BOOST_AUTO_TEST_CASE(a_learner_killed_at_any_instruction_while_it_follows_pages_leaves_what_a_survivor_completes,
                     *kWhereTracingIsAllowed) {
  for (const View& view : {View{}, transitions(2)}) {
    auto m = eventful(view);
    const uint64_t page_head = m->header().page_head.load();
    BOOST_REQUIRE(page_head > 24U);
    kill_everywhere(*m, [&] { settle(*m); }, nothing);
  }
}

BOOST_AUTO_TEST_CASE(whoever_repairs_all_that_follows_from_the_rows_and_dies_at_any_instruction_can_be_repaired,
                     *kWhereTracingIsAllowed) {
  for (const View& view : {View{}, transitions(2)}) {
    auto m = eventful(view);
    m->header().dirty = Dirty::kLinks;
    kill_everywhere(*m, [&] { const SegmentLock repairs(*m); }, nothing);
  }
}

BOOST_AUTO_TEST_CASE(a_repair_finds_the_same_rows_as_an_absorption) {
  for (const View& view : {View{}, transitions(2)}) {
    auto absorbed = eventful(view), repaired = eventful(view);
    settle(*absorbed);
    repaired->header().dirty = Dirty::kLinks;
    settle(*repaired);
    BOOST_TEST(violation(*repaired) == "");
    for (uint64_t slot = 0; slot < 12; slot++) {
      BOOST_TEST(absorbed->at(slot) == repaired->at(slot));
      BOOST_TEST(is_drawable(*absorbed, slot) == is_drawable(*repaired, slot));
    }
  }
}

BOOST_AUTO_TEST_SUITE_END()
