#include <boost/test/unit_test.hpp>
#include <limits>
#include <vector>

#include "segment/segment_reader.h"
#include "segments.h"
#include "session/segment_lock.h"
#include "write/participants.h"

BOOST_AUTO_TEST_SUITE(test_reader)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

Descriptor for_reading(const SegmentMemory& m) { return m.open_again(O_RDONLY); }

std::vector<char> content_of(const SegmentMemory& m) { return {m.base(), m.base() + m.layout().bytes}; }

// Rows with priority 1, absorbed.
void write_rows(SegmentMemory& m, uint64_t n) {
  const int id = join(m, Role::kWriter);
  RingWriter writer(m, id);
  std::vector<RowMeta> meta(n);
  std::vector<int64_t> keys(n);
  uint64_t written = 0;
  writer.append(n, meta.data(), keys.data(), written, [](uint64_t, uint64_t) {});
  leave(m, id);
  SegmentLock lock(m);
  lock.absorb();
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_reader_sees_what_the_header_says) {
  auto m = make_segment();
  write_rows(*m, 5);
  m->header().draws.store(7);
  const SegmentReader reader(for_reading(*m));
  const SegmentFacts f = reader.facts();
  BOOST_TEST(f.head == 5U);
  BOOST_TEST(f.absorbed == 5U);
  BOOST_TEST(f.rows == 5U);
  BOOST_TEST(f.inserted == m->header().inserted);
  BOOST_TEST(f.drawable == static_cast<uint64_t>(m->tree().count()));
  BOOST_TEST(f.draws == 7U);
  BOOST_TEST(f.holder_pid == 0);
  BOOST_TEST(reader.text() == "a description");
}

BOOST_AUTO_TEST_CASE(a_reader_changes_no_byte_and_holds_no_lock) {
  auto m = make_segment();
  write_rows(*m, 5);
  const std::vector<char> before = content_of(*m);
  {
    const SegmentReader reader(for_reading(*m)), another(for_reading(*m));
    for (int i = 0; i < 100; i++) reader.facts();
    BOOST_TEST(reader.in_use());   // by `m`, which has taken the lock
    m->liveness().forget();        // as its death would
    BOOST_TEST(!reader.in_use());  // another reader is nobody
  }
  BOOST_TEST((content_of(*m) == before));
}

BOOST_AUTO_TEST_CASE(leaves_and_keys_are_copied_as_far_as_there_are_slots) {
  auto m = make_segment();
  write_rows(*m, 5);
  const SegmentReader reader(for_reading(*m));
  std::vector<float> leaves(8, -1.0F);
  std::vector<uint64_t> keys1(8, std::numeric_limits<uint64_t>::max());
  BOOST_TEST(reader.copy_slots(0, 100, leaves.data(), keys1.data()) == 8U);
  for (uint64_t slot = 0; slot < 8; slot++) {
    BOOST_TEST(leaves[slot] == m->tree().leaf(static_cast<int64_t>(slot)));
    BOOST_TEST(keys1[slot] == m->at(slot));
  }
  BOOST_TEST(reader.copy_slots(6, 100, leaves.data(), keys1.data()) == 2U);
  BOOST_TEST(reader.copy_slots(8, 1, leaves.data(), keys1.data()) == 0U);
}

BOOST_AUTO_TEST_CASE(participants_are_seen_with_whether_they_live) {
  auto m = make_segment();
  const int writer = join(*m, Role::kWriter), learner = join(*m, Role::kLearner);
  note_draw(m->participant(learner), 32);
  note_draw(m->participant(learner), 32);
  const SegmentReader reader(for_reading(*m));
  std::vector<ParticipantFacts> people = reader.facts().participants;
  BOOST_TEST_REQUIRE(people.size() == 2U);
  BOOST_TEST((people[0].id == writer && people[0].role == Role::kWriter && people[0].alive));
  BOOST_TEST((people[1].role == Role::kLearner && people[1].rows == 64U && people[1].last_draw > 0));
  m->liveness().forget();  // as its death would
  people = reader.facts().participants;
  BOOST_TEST_REQUIRE(people.size() == 2U);
  BOOST_TEST((!people[0].alive && !people[1].alive));
}

BOOST_AUTO_TEST_CASE(a_place_that_another_takes_has_drawn_nothing) {
  auto m = make_segment();
  const int first = join(*m, Role::kLearner);
  note_draw(m->participant(first), 32);
  leave(*m, first);
  BOOST_TEST(join(*m, Role::kLearner) == first);
  const SegmentReader reader(for_reading(*m));
  const ParticipantFacts again = reader.facts().participants.at(0);
  BOOST_TEST((again.rows == 0U && again.last_draw == 0));
}

BOOST_AUTO_TEST_CASE(the_limiter_that_holds_is_read) {
  auto m = make_segment();
  const SegmentReader reader(for_reading(*m));
  for (uint64_t size = 2; size < 10; size++) {
    LimiterConfig config;
    config.min_size = size;
    change_limiter(m->header(), config);
    BOOST_TEST(reader.facts().limiter.min_size == size);
  }
}

BOOST_AUTO_TEST_CASE(what_is_no_segment_is_refused) {
  BOOST_CHECK_THROW(SegmentReader(memory_file(1 << 20)), NotASegment);
  BOOST_CHECK_THROW(published_version(memory_file(16)), NotASegment);
  BOOST_CHECK_THROW(published_version(memory_file(1 << 14)), NotASegment);
}

BOOST_AUTO_TEST_CASE(the_newest_publication_of_weights_is_read) {
  const WeightsMemory weights(memory_file(WeightsMemory::bytes(1000)), kNonce, 1000, true, 41);
  const Descriptor own = Descriptor::duplicate(weights.fd());
  BOOST_TEST(published_version(own) == 41U);
  weights.header().published.store(42);
  BOOST_TEST(published_version(own) == 42U);
}

BOOST_AUTO_TEST_SUITE_END()
