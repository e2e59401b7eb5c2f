// Mappings that keep huge pages huge, and what holds whether the system has such pages or not.
#include <algorithm>
#include <boost/test/unit_test.hpp>
#include <fstream>
#include <string>

#include "segments.h"
#include "system/pages.h"

BOOST_AUTO_TEST_SUITE(test_pages)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

struct Mapping {
  Mapping(const Descriptor& file, uint64_t bytes, uint64_t offset = 0)
      : size(bytes), base(map_shared(file, bytes, offset)) {}
  Mapping(const Mapping&) = delete;
  ~Mapping() { munmap(base, size); }

  // Bytes of it that lie in huge pages, as the kernel reports.
  uint64_t huge() const {
    std::ifstream maps("/proc/self/smaps");
    std::string line;
    const std::string name = "ShmemPmdMapped:";
    for (bool here = false; std::getline(maps, line);) {
      if (const size_t dash = line.find('-'); dash != std::string::npos && dash < line.find(' ') && dash < 17)
        here = std::stoull(line, nullptr, 16) == reinterpret_cast<uintptr_t>(base);
      if (here && line.starts_with(name)) return std::stoull(line.substr(name.size())) * 1024;
    }
    return 0;
  }

  uint64_t size;
  char* base;
};

void touch(const Mapping& m) {
  for (uint64_t at = 0; at < m.size; at += kPage) m.base[at] = static_cast<char>(at / kPage);
}

bool as_touched(const Mapping& m) {
  for (uint64_t at = 0; at < m.size; at += kPage)
    if (m.base[at] != static_cast<char>(at / kPage)) return false;
  return true;
}

uint64_t resident(const Descriptor& file) {
  struct stat status;
  fstat(file.get(), &status);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

// Of test cases about pages that not every system has: skipped where it has none to give, and they say so.
boost::test_tools::assertion_result huge_pages_are_given(boost::unit_test::test_unit_id) {
  const Descriptor file = memory_file(kHugePage);
  boost::test_tools::assertion_result given(take_huge_pages(file, 0, kHugePage));
  given.message() << "this system has no huge pages to give";
  return given;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_mapping_is_as_long_as_asked_for_and_aligned_for_huge_pages) {
  for (uint64_t bytes : {kPage, kHugePage - kPage, kHugePage, kHugePage + kPage, 3 * kHugePage + 7 * kPage}) {
    const Descriptor file = memory_file(bytes);
    const Mapping m(file, bytes);
    BOOST_TEST(reinterpret_cast<uintptr_t>(m.base) % (bytes < kHugePage ? kPage : kHugePage) == 0U);
    touch(m);
    BOOST_TEST(as_touched(Mapping(file, bytes)));
  }
}

BOOST_AUTO_TEST_CASE(huge_pages_are_there_when_they_were_taken_and_hold_what_is_written) {
  const uint64_t bytes = 4 * kHugePage + 3 * kPage;
  const Descriptor file = memory_file(bytes);
  const bool taken = take_huge_pages(file, 0, bytes);
  if (taken) BOOST_TEST(resident(file) == 4 * kHugePage);
  const Mapping one(file, bytes), other(file, bytes);
  touch(one);
  BOOST_TEST(as_touched(other));
  BOOST_TEST_MESSAGE("huge pages: " << (taken ? "taken" : "none to be had"));
  if (taken) BOOST_TEST(other.huge() == 4 * kHugePage);
}

BOOST_AUTO_TEST_CASE(what_a_part_of_a_file_takes_is_in_that_part,
                     *boost::unit_test::precondition(huge_pages_are_given)) {
  const Descriptor file = memory_file(8 * kHugePage);
  BOOST_REQUIRE(take_huge_pages(file, 2 * kHugePage, 3 * kHugePage));
  BOOST_TEST(resident(file) == 3 * kHugePage);
  const Mapping part(file, 3 * kHugePage, 2 * kHugePage);
  BOOST_TEST(std::all_of(part.base, part.base + part.size, [](auto byte) { return byte == 0; }));
  touch(part);
  BOOST_TEST(resident(file) == 3 * kHugePage);
}

BOOST_AUTO_TEST_CASE(none_are_taken_where_the_environment_forbids_them) {
  const Descriptor file = memory_file(2 * kHugePage);
  setenv("TORCHREPLAY_HUGE_PAGES", "0", 1);
  BOOST_TEST(!take_huge_pages(file, 0, 2 * kHugePage));
  unsetenv("TORCHREPLAY_HUGE_PAGES");
  BOOST_TEST(resident(file) == 0U);
}

BOOST_AUTO_TEST_SUITE_END()
