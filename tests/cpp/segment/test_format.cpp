#include <boost/test/unit_test.hpp>
#include <cstddef>
#include <random>

#include "segment/format.h"
#include "segments.h"
#include "views.h"

BOOST_AUTO_TEST_SUITE(test_format)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

Plan small_plan() {
  Plan plan;
  plan.capacity = 50;
  plan.fields = {{Element::kF32, 16}, {Element::kU8, 2000}, {Element::kI64, 8}};
  plan.text = "{\"obs\": 1}";
  return plan;
}

Descriptor copy_of(const SegmentMemory& m) {
  Descriptor fd = memory_file(m.layout().bytes);
  // The table of participants may be left out: nothing reads it on opening.
  for (auto [begin, end] : {std::pair{uint64_t{0}, kSegmentHeaderBytes}, {m.layout().config, m.layout().records}})
    if (pwrite(fd.get(), m.base() + begin, end - begin, static_cast<off_t>(begin)) < 0)
      throw std::runtime_error("pwrite");
  return fd;
}

void poke(const Descriptor& fd, uint64_t offset, const void* data, size_t n) {
  if (pwrite(fd.get(), data, n, static_cast<off_t>(offset)) != static_cast<ssize_t>(n))
    throw std::runtime_error("pwrite");
}

void flip(const Descriptor& fd, uint64_t offset, uint8_t mask) {
  uint8_t byte = 0;
  if (pread(fd.get(), &byte, 1, static_cast<off_t>(offset)) != 1) throw std::runtime_error("pread");
  byte ^= mask;
  poke(fd, offset, &byte, 1);
}

enum class Opened { kCleanly, kRefused };

// Anything but a clean open and a NotASegment fails the test.
Opened try_open(Descriptor fd) {
  try {
    auto m = open_segment(std::move(fd), kNonce);
    return Opened::kCleanly;
  } catch (const NotASegment&) {
    return Opened::kRefused;
  }
}

// Where open_segment() finds the configuration.
constexpr uint64_t kConfig = kSegmentHeaderBytes + kMaxParticipants * kParticipantBytes;

}  // namespace

BOOST_AUTO_TEST_CASE(what_was_formatted_is_found_when_opened) {
  const Plan plan = small_plan();
  auto made = make_segment(plan);
  append_row(*made, 1, 99);
  auto m = open_segment(Descriptor::duplicate(made->fd()), kNonce);
  BOOST_TEST(m->layout().hash() == made->layout().hash());
  BOOST_TEST(m->capacity() == 50U);
  BOOST_TEST(m->text() == plan.text);
  BOOST_TEST(m->header().seed == 7U);
  BOOST_TEST(m->header().max_raw == 1.0F);
  BOOST_TEST(m->header().sampler.alpha == plan.sampler.alpha);
  BOOST_TEST(m->header().head.load() == 1U);
  BOOST_TEST(append_row(*m, 2) == 1U);
  for (size_t f = 0; f < plan.fields.size(); f++) {
    BOOST_TEST((m->layout().fields[f].element == plan.fields[f].element));
    BOOST_TEST(m->layout().fields[f].offset == made->layout().fields[f].offset);
  }
}

BOOST_AUTO_TEST_CASE(a_segment_opened_elsewhere_makes_items_of_its_rows_as_its_maker_does) {
  Plan plan = small_plan();
  plan.view = sequences(4, 3, 2);
  auto made = make_segment(plan);
  auto m = open_segment(Descriptor::duplicate(made->fd()), kNonce);
  const View view = m->layout().view;
  BOOST_TEST(view.span == 6U);
  BOOST_TEST(view.min_steps == 3U);
  BOOST_TEST(view.stride == 3U);
  BOOST_TEST(view.history == 0U);
  BOOST_TEST(view.across == 0U);
  BOOST_TEST(view.priority_steps == 6U);
}

BOOST_AUTO_TEST_CASE(a_spec_without_fields_or_text_can_be_opened) {
  Plan plan;
  plan.fields.clear();
  plan.text.clear();
  auto made = make_segment(plan);
  BOOST_TEST(open_segment(Descriptor::duplicate(made->fd()), kNonce)->text() == "");
}

BOOST_AUTO_TEST_CASE(the_description_is_the_one_that_was_checked_whatever_others_write_there_since) {
  const Plan plan = small_plan();
  auto made = make_segment(plan);
  auto m = open_segment(Descriptor::duplicate(made->fd()), kNonce);
  std::memset(made->config(), 0xff, made->layout().config_bytes);
  BOOST_TEST(m->text() == plan.text);
}

BOOST_AUTO_TEST_CASE(any_changed_byte_of_the_checked_header_is_refused) {
  auto made = make_segment(small_plan());
  const size_t offsets[] = {offsetof(Header, magic), offsetof(Header, version), offsetof(Header, layout_hash),
                            offsetof(Header, nonce), offsetof(Header, bytes),   offsetof(Header, config_bytes)};
  for (size_t offset : offsets)
    for (size_t byte = 0; byte < 8; byte++)
      for (uint8_t mask : {0x01, 0x80, 0xff}) {
        Descriptor fd = copy_of(*made);
        flip(fd, offset + byte, mask);
        BOOST_TEST_INFO("offset " << offset + byte);
        BOOST_TEST((try_open(std::move(fd)) == Opened::kRefused));
      }
}

BOOST_AUTO_TEST_CASE(any_changed_byte_of_capacity_view_and_fields_is_refused) {
  auto made = make_segment(small_plan());
  const uint64_t end = kConfig + config_bytes(3, 0);
  for (uint64_t offset = kConfig; offset < end; offset++)
    for (uint8_t mask : {0x01, 0x10, 0x80, 0xff}) {
      Descriptor fd = copy_of(*made);
      flip(fd, offset, mask);
      BOOST_TEST_INFO("offset " << offset - kConfig << " mask " << static_cast<int>(mask));
      BOOST_TEST((try_open(std::move(fd)) == Opened::kRefused));
    }
}

BOOST_AUTO_TEST_CASE(another_nonce_is_told_from_another_version_and_from_no_segment) {
  auto made = make_segment();
  auto message = [](Descriptor fd, uint64_t nonce) {
    try {
      open_segment(std::move(fd), nonce);
    } catch (const NotASegment& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  BOOST_TEST(message(copy_of(*made), kNonce + 1).find("another buffer") != std::string::npos);
  Descriptor versioned = copy_of(*made);
  const uint64_t version = 99;
  poke(versioned, offsetof(Header, version), &version, 8);
  BOOST_TEST(message(std::move(versioned), kNonce).find("version 99") != std::string::npos);
  BOOST_TEST(message(memory_file(1 << 20), kNonce).find("magic") != std::string::npos);
  BOOST_TEST(message(memory_file(0), kNonce).find("0 bytes") != std::string::npos);
  BOOST_TEST(message(memory_file(4095), kNonce).find("too short") != std::string::npos);
}

BOOST_AUTO_TEST_CASE(a_truncated_or_grown_file_is_refused) {
  auto made = make_segment(small_plan());
  const uint64_t bytes = made->layout().bytes;
  for (uint64_t size : {uint64_t{4096}, uint64_t{8192}, kConfig, kConfig + 10, bytes - 1, bytes - 4096, bytes + 1}) {
    Descriptor fd = copy_of(*made);
    if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) throw std::runtime_error("ftruncate");
    BOOST_TEST((try_open(std::move(fd)) == Opened::kRefused));
  }
}

// A file whose header agrees with its size, but not with what a segment needs.
BOOST_AUTO_TEST_CASE(a_short_file_with_a_fitting_header_is_refused) {
  auto made = make_segment(small_plan());
  for (uint64_t size : {uint64_t{4096}, uint64_t{8192}, kConfig - 1, kConfig})
    for (uint64_t config : {uint64_t{0}, uint64_t{100}, uint64_t{1} << 40, kNever - 10}) {
      Descriptor fd = copy_of(*made);
      if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) throw std::runtime_error("ftruncate");
      poke(fd, offsetof(Header, bytes), &size, 8);
      poke(fd, offsetof(Header, config_bytes), &config, 8);
      BOOST_TEST((try_open(std::move(fd)) == Opened::kRefused));
    }
}

BOOST_AUTO_TEST_CASE(random_flips_in_header_and_configuration_never_do_worse_than_being_refused) {
  std::mt19937_64 random(1);
  auto made = make_segment(small_plan());
  int refused = 0;
  for (int k = 0; k < 3000; k++) {
    Descriptor fd = copy_of(*made);
    for (uint64_t n = 1 + random() % 6; n > 0; n--) {
      const bool in_config = random() % 2;
      const uint64_t offset = in_config ? kConfig + random() % made->layout().config_bytes : random() % 512;
      flip(fd, offset, static_cast<uint8_t>(1 + random() % 255));
    }
    refused += try_open(std::move(fd)) == Opened::kRefused;
  }
  BOOST_TEST(refused > 1000);
}

BOOST_AUTO_TEST_SUITE_END()
