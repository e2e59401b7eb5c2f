#include <boost/test/unit_test.hpp>
#include <memory>
#include <thread>
#include <vector>

#include "children.h"
#include "segment/weights_memory.h"
#include "segments.h"

BOOST_AUTO_TEST_SUITE(test_weights)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr uint64_t kBytes = 8 * 1000;
constexpr int64_t kSecond = 1'000'000'000;

std::unique_ptr<WeightsMemory> make_weights() {
  return std::make_unique<WeightsMemory>(memory_file(WeightsMemory::bytes(kBytes)), kNonce, kBytes, true);
}

void fill(WeightsMemory& w, uint64_t version, uint64_t value) {
  for (uint64_t i = 0; i < kBytes; i += 8) copy_payload(w.buffer(version) + i, &value, 8);
}

void publish(WeightsMemory& w, uint64_t value) {
  BOOST_REQUIRE(w.begin_publish(60 * kSecond));
  fill(w, w.version() + 1, value);
  w.end_publish(true);
}

// The one value that a buffer is filled with; -1 when there are several.
int64_t value_of(const std::vector<int64_t>& copy) {
  for (int64_t v : copy)
    if (v != copy[0]) return -1;
  return copy[0];
}

std::vector<int64_t> copy_of(const WeightsMemory& w, uint64_t version) {
  std::vector<int64_t> copy(kBytes / 8);
  copy_payload(copy.data(), w.buffer(version), kBytes);
  return copy;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_publication_is_seen_when_it_is_complete) {
  auto w = make_weights();
  BOOST_TEST(w->version() == 0U);
  BOOST_TEST(w->begin_publish(kSecond));
  fill(*w, 1, 11);
  BOOST_TEST(w->version() == 0U);
  w->end_publish(true);
  BOOST_TEST(w->version() == 1U);
  BOOST_TEST(value_of(copy_of(*w, 1)) == 11);
  BOOST_TEST(w->intact(1));
}

BOOST_AUTO_TEST_CASE(the_newest_stays_readable_while_the_next_is_being_published) {
  auto w = make_weights();
  publish(*w, 11);
  BOOST_TEST(w->begin_publish(kSecond));
  fill(*w, 2, 22);
  BOOST_TEST(value_of(copy_of(*w, 1)) == 11);
  BOOST_TEST(w->intact(1));
  w->end_publish(true);
  BOOST_TEST(w->intact(1));  // its buffer is still whole
  BOOST_TEST(w->begin_publish(kSecond));
  BOOST_TEST(!w->intact(1));  // now it is being overwritten
  BOOST_TEST(w->intact(2));
  w->end_publish(false);
}

BOOST_AUTO_TEST_CASE(a_publication_given_up_changes_nothing) {
  auto w = make_weights();
  publish(*w, 11);
  BOOST_TEST(w->begin_publish(kSecond));
  fill(*w, 2, 22);
  w->end_publish(false);
  BOOST_TEST(w->version() == 1U);
  BOOST_TEST(value_of(copy_of(*w, 1)) == 11);
  publish(*w, 33);
  BOOST_TEST(w->version() == 2U);
  BOOST_TEST(value_of(copy_of(*w, 2)) == 33);
}

BOOST_AUTO_TEST_CASE(a_publication_may_be_of_a_later_version) {
  auto w = make_weights();
  publish(*w, 11);
  BOOST_TEST(w->begin_publish(kSecond));
  fill(*w, 6, 22);
  BOOST_TEST(value_of(copy_of(*w, 1)) == 11);
  w->end_publish(true, 6);
  BOOST_TEST(w->version() == 6U);
  BOOST_TEST(w->intact(1));
  BOOST_TEST(w->intact(6));
  BOOST_TEST(w->begin_publish(kSecond));
  BOOST_TEST(!w->intact(1));
  BOOST_TEST(w->intact(6));
  w->end_publish(true, 3);  // the next one is later
  BOOST_TEST(w->version() == 7U);
}

BOOST_AUTO_TEST_CASE(a_publisher_killed_in_between_harms_neither_readers_nor_the_next_publisher) {
  auto w = make_weights();
  publish(*w, 11);
  Gate half;
  Child publisher([&] {
    w->begin_publish(kSecond);
    const int64_t part = 22;
    copy_payload(w->buffer(2), &part, 8);
    half.open();
    sleep_for_ever();
  });
  half.wait();
  BOOST_TEST(!w->begin_publish(1'000'000));  // one publisher at a time
  publisher.kill_and_wait();
  BOOST_TEST(w->version() == 1U);
  BOOST_TEST(w->intact(1));
  BOOST_TEST(value_of(copy_of(*w, 1)) == 11);
  publish(*w, 33);
  publish(*w, 44);
  BOOST_TEST(w->version() == 3U);
  BOOST_TEST(value_of(copy_of(*w, 2)) == 33);
  BOOST_TEST(value_of(copy_of(*w, 3)) == 44);
}

BOOST_AUTO_TEST_CASE(only_the_thread_that_has_begun_ends_a_publication) {
  auto w = make_weights();
  w->end_publish(true);
  BOOST_TEST(w->version() == 0U);
  BOOST_TEST(w->begin_publish(kSecond));
  BOOST_TEST(w->publisher() == static_cast<uint32_t>(gettid()));
  std::thread([&] {
    BOOST_TEST(!w->begin_publish(1'000'000));
    w->end_publish(true);
  }).join();
  WeightsMemory other(Descriptor::duplicate(w->fd()), kNonce, kBytes, false);
  other.end_publish(true);
  BOOST_TEST(!other.begin_publish(1'000'000));
  BOOST_TEST(w->version() == 0U);
  w->end_publish(true);
  BOOST_TEST(w->version() == 1U);
  BOOST_TEST(w->publisher() == 0U);
  w->end_publish(true);
  BOOST_TEST(w->version() == 1U);
}

BOOST_AUTO_TEST_CASE(what_is_published_is_what_others_attach) {
  auto w = make_weights();
  publish(*w, 11);
  const WeightsMemory other(Descriptor::duplicate(w->fd()), kNonce, kBytes, false);
  BOOST_TEST(other.version() == 1U);
  BOOST_TEST(value_of(copy_of(other, 1)) == 11);
}

BOOST_AUTO_TEST_CASE(other_weights_than_the_handles_are_refused) {
  auto w = make_weights();
  auto attach = [&](uint64_t nonce, uint64_t bytes) {
    WeightsMemory(Descriptor::duplicate(w->fd()), nonce, bytes, false);
  };
  BOOST_CHECK_THROW(attach(kNonce + 1, kBytes), std::runtime_error);
  BOOST_CHECK_THROW(attach(kNonce, kBytes + 1), std::runtime_error);  // the same number of pages
  BOOST_CHECK_THROW(attach(kNonce, kBytes * 2), std::runtime_error);
  for (uint64_t* field : {&w->header().magic, &w->header().version}) {
    (*field)++;
    BOOST_CHECK_THROW(attach(kNonce, kBytes), std::runtime_error);
    (*field)--;
  }
  BOOST_CHECK_NO_THROW(attach(kNonce, kBytes));
}

BOOST_AUTO_TEST_CASE(the_size_is_the_one_that_was_checked_whatever_others_write_there_since) {
  auto w = make_weights();
  const WeightsMemory other(Descriptor::duplicate(w->fd()), kNonce, kBytes, false);
  const auto between = other.buffer(1) - other.buffer(0);
  w->header().buffer_bytes = uint64_t{1} << 45;
  BOOST_TEST(other.buffer_bytes() == kBytes);
  BOOST_TEST(other.buffer(1) - other.buffer(0) == between);
}

BOOST_AUTO_TEST_CASE(weights_are_read_but_not_published_from_another_pid_namespace) {
  auto w = make_weights();
  publish(*w, 11);
  const int status = run_in_own_pid_namespace([&] {
    if (value_of(copy_of(*w, w->version())) != 11) _exit(10);
    try {
      w->begin_publish(kSecond);
    } catch (const OtherNamespace&) {
      _exit(0);
    }
    _exit(11);
  });
  BOOST_TEST_REQUIRE(status != 77, "this system lets nobody make a pid namespace");
  BOOST_TEST(status == 0);
  publish(*w, 12);
}

// Every publication is one value all over; a copy found intact must be of one value, the publication's own.
BOOST_AUTO_TEST_CASE(copies_found_intact_under_a_fast_publisher_are_whole) {
  constexpr int64_t kPublications = 4000;
  auto w = make_weights();
  std::thread publisher([&] {
    for (int64_t v = 1; v <= kPublications; v++) publish(*w, static_cast<uint64_t>(v));
  });
  int64_t wrong = 0, intact = 0;
  for (uint64_t version = 0; version < kPublications;) {
    version = w->version();
    const std::vector<int64_t> copy = copy_of(*w, version);
    if (!w->intact(version)) continue;
    intact++;
    wrong += value_of(copy) != static_cast<int64_t>(version);
  }
  publisher.join();
  BOOST_TEST(wrong == 0);
  BOOST_TEST(intact > 0);
}

BOOST_AUTO_TEST_SUITE_END()
