#include <boost/test/unit_test.hpp>
#include <cstdio>
#include <filesystem>
#include <random>

#include "children.h"
#include "explorers.h"
#include "invariants.h"
#include "ragged.h"
#include "session/segment_file.h"
#include "views.h"
#include "write/participants.h"

namespace {
bool disk_is_full = false;
}

// In the place of the system's, so that a disk can be full here.
extern "C" int posix_fallocate(int fd, off_t from, off_t bytes) {
  return disk_is_full ? ENOSPC : fallocate(fd, 0, from, bytes) == 0 || errno == EOPNOTSUPP ? 0 : errno;
}

BOOST_AUTO_TEST_SUITE(test_file)

using namespace torchreplay;
using namespace torchreplay::testing;

namespace {

constexpr uint64_t kBoot = 77, kAnother = 78;

// A segment in a file that the test's end removes.
class SegmentFile {
 public:
  explicit SegmentFile(Plan plan = {}) {
    plan.boot = kBoot;
    const SegmentConfig config = config_of(plan);
    path_ = (std::filesystem::temp_directory_path() / "torchreplay-XXXXXX").string();
    Descriptor fd(mkstemp(path_.data()));
    if (fd.get() < 0 || ftruncate(fd.get(), static_cast<off_t>(config.layout.bytes)) != 0)
      throw std::system_error(errno, std::generic_category(), "a temporary file");
    flock(fd.get(), LOCK_SH);
    memory_ = format_segment(std::move(fd), config);
    memory_->header().ticket_limit.store(kNever);
  }
  ~SegmentFile() { std::filesystem::remove(path_); }

  SegmentMemory& memory() { return *memory_; }
  Descriptor descriptor() const { return Descriptor(open(path_.c_str(), O_RDWR | O_CLOEXEC)); }
  // Its processes die.
  void abandon() { memory_.reset(); }
  // Its last process leaves.
  void release() { release_segment(std::move(memory_)); }

  Repaired repair(uint64_t boot = kBoot) {
    const Repaired repaired = repair_segment(descriptor(), boot, kAnother);
    Descriptor fd = descriptor();
    flock(fd.get(), LOCK_SH);
    memory_ = open_segment(std::move(fd), repaired.nonce);
    return repaired;
  }
  Phase phase() const { return HeaderPage(descriptor()).file().phase; }

  void flip(uint64_t offset, uint8_t mask) const {
    const Descriptor fd = descriptor();
    uint8_t byte = 0;
    if (pread(fd.get(), &byte, 1, static_cast<off_t>(offset)) != 1) throw std::runtime_error("pread");
    byte ^= mask;
    if (pwrite(fd.get(), &byte, 1, static_cast<off_t>(offset)) != 1) throw std::runtime_error("pwrite");
  }

 private:
  std::string path_;
  std::unique_ptr<SegmentMemory> memory_;
};

void absorb(SegmentMemory& m) {
  SegmentLock lock(m);
  lock.absorb();
}

Plan linked_plan() {
  Plan plan;
  plan.capacity = 40;
  plan.view = transitions(3, 2);
  return plan;
}

}  // namespace

BOOST_AUTO_TEST_CASE(a_row_that_was_being_written_is_dropped_and_counted_and_its_slot_serves_again) {
  SegmentFile file;
  const int id = join(file.memory(), Role::kWriter);
  for (uint64_t k = 0; k < 11; k++) append_row(file.memory(), id, k);  // a turn of eight slots, and three
  absorb(file.memory());
  SteppedWriter writer(file.memory(), id);
  BOOST_TEST(writer.take_ticket() == 11U);
  BOOST_TEST(writer.seize());
  file.abandon();
  BOOST_TEST(file.repair().dropped_rows == 1U);
  SegmentMemory& m = file.memory();
  BOOST_TEST(m.file().dropped_rows.load() == 1U);
  BOOST_TEST(m.header().rows == 7U);
  BOOST_TEST(m.tree().count() == 7);
  for (uint64_t key = 4; key < 12; key++) BOOST_TEST(m.at(m.slot_of(key)) == (key == 11 ? 0 : key + 1));
  for (uint64_t key = 12; key < 20; key++) BOOST_TEST(append_row(m, join(m, Role::kWriter)) == key);
  absorb(m);
  BOOST_TEST(m.header().rows == 8U);
}

BOOST_AUTO_TEST_CASE(a_mutex_that_a_dead_process_holds_and_its_half_done_absorption_are_of_the_past) {
  SegmentFile file;
  const int id = join(file.memory(), Role::kWriter);
  for (uint64_t k = 0; k < 5; k++) append_row(file.memory(), id, k, 2.0F);
  absorb(file.memory());
  Child dead([&] {
    file.memory().header().mutex.lock_for(1);
    file.memory().header().dirty = Dirty::kLinks;
    file.memory().tree().leaves()[3] = 0;
    lose_the_list_of_locks();  // so that the kernel does not give it free either
  });
  BOOST_TEST(dead.wait() == 0);
  BOOST_TEST(file.memory().header().mutex.holder() != 0U);
  file.abandon();
  BOOST_TEST(file.repair().dropped_rows == 0U);
  SegmentMemory& m = file.memory();
  absorb(m);
  BOOST_TEST(m.tree().count() == 5);
  BOOST_TEST(m.tree().leaf(3) == m.tree().leaf(2));
  BOOST_TEST(take_census(m, false).writers == 0);
}

BOOST_AUTO_TEST_CASE(the_last_to_leave_puts_the_file_to_rest_and_only_then_it_survives_the_boot) {
  SegmentFile file;
  append_row(file.memory(), join(file.memory(), Role::kWriter));
  file.abandon();
  BOOST_CHECK_THROW(file.repair(kBoot + 1), NotASegment);
  file.repair();
  {
    Descriptor other = file.descriptor();
    flock(other.get(), LOCK_SH);
    file.release();
    BOOST_TEST((file.phase() == Phase::kInUse));
    BOOST_TEST(nonce_in_use(other, kBoot).value_or(0) == kNonce);
    BOOST_TEST(!nonce_in_use(other, kBoot + 1).has_value());
  }
  file.repair();
  file.release();
  BOOST_TEST((file.phase() == Phase::kSealed));
  BOOST_CHECK_THROW(open_segment(file.descriptor(), kNonce), NotASegment);
  BOOST_TEST(!nonce_in_use(file.descriptor(), kBoot).has_value());
  file.repair(kBoot + 1);
  absorb(file.memory());
  BOOST_TEST(file.memory().header().rows == 1U);
}

BOOST_AUTO_TEST_CASE(linked_items_and_their_leaves_come_back_as_they_were) {
  SegmentFile file(linked_plan());
  const int id = join(file.memory(), Role::kWriter);
  Explorer stream(file.memory(), id);
  for (int episode = 0; episode < 4; episode++) stream.episode(6);
  absorb(file.memory());
  std::vector<float> leaves(file.memory().tree().leaves(), file.memory().tree().leaves() + 40);
  BOOST_TEST(file.memory().tree().count() > 10);
  file.memory().tree().leaves()[1] = leaves[1] = leaves[1] > 0 ? 0.5F : 0.0F;
  file.abandon();
  file.repair();
  for (uint64_t slot = 0; slot < 40; slot++)
    BOOST_TEST(file.memory().tree().leaf(static_cast<int64_t>(slot)) == leaves[slot]);
}

BOOST_AUTO_TEST_CASE(what_no_death_can_leave_is_refused_every_time) {
  using Spoil = void (*)(SegmentMemory&);
  const Spoil spoils[] = {
      [](SegmentMemory& m) { m.row(2).word = slot_word::done(3, 1); },        // the key of another slot
      [](SegmentMemory& m) { m.row(2).word = slot_word::done(2 + 400, 1); },  // a ticket never issued
      [](SegmentMemory& m) { m.row(2).step = 7; },
      [](SegmentMemory& m) { m.row(2).link = uint64_t{30} << 16; },  // a younger predecessor
      [](SegmentMemory& m) { m.tree().leaves()[2] = NAN; },
      [](SegmentMemory& m) { m.header().max_raw = -1; },
      [](SegmentMemory& m) { m.header().head = uint64_t{1} << 60; },
  };
  for (const Spoil spoil : spoils) {
    SegmentFile file(linked_plan());
    Explorer(file.memory(), join(file.memory(), Role::kWriter)).episode(6);
    absorb(file.memory());
    spoil(file.memory());
    file.abandon();
    for (int k = 0; k < 2; k++) BOOST_CHECK_THROW(file.repair(), NotASegment);
    BOOST_TEST((file.phase() == Phase::kInUse));
  }
}

BOOST_AUTO_TEST_CASE(pending_slots_are_found_anew) {
  SegmentFile file(linked_plan());
  Explorer(file.memory(), join(file.memory(), Role::kWriter)).episode(6);
  absorb(file.memory());
  file.memory().pending_words()[0] = kNever;  // of slots beyond the last one too
  file.abandon();
  file.repair();
  BOOST_TEST(file.memory().header().pending == 0U);
  BOOST_TEST(file.memory().pending_words()[0] == 0U);
}

// With any content of the file, repairing it reads and writes nothing beside it: run under the address sanitizer.
BOOST_AUTO_TEST_CASE(random_damage_is_refused_or_repaired) {
  std::mt19937_64 random(3);
  int refused = 0, repaired = 0;
  for (int k = 0; k < 600; k++) {
    SegmentFile file(linked_plan());
    Explorer stream(file.memory(), join(file.memory(), Role::kWriter));
    for (int episode = 0; episode < 4; episode++) stream.episode(6);
    absorb(file.memory());
    const Layout layout = file.memory().layout();
    k % 2 ? file.release() : file.abandon();
    const uint64_t starts[] = {0, kFileState, layout.config, layout.records, layout.at, layout.tree};
    const uint64_t start = starts[random() % 6];
    for (uint64_t n = 1 + random() % 4; n > 0; n--)
      file.flip(start + random() % std::min<uint64_t>(kLine * 16, layout.bytes - start),
                static_cast<uint8_t>(1U << random() % 8));
    try {
      file.repair();
    } catch (const NotASegment&) {
      refused++;
      continue;
    }
    repaired++;
    Explorer again(file.memory(), join(file.memory(), Role::kWriter));
    for (int episode = 0; episode < 10; episode++) again.episode(6);
    absorb(file.memory());
  }
  BOOST_TEST(refused > 100);
  BOOST_TEST(repaired > 100);
}

namespace {

constexpr uint32_t kMost = 60;  // 420 bytes in all, 7 pages

Plan values_plan() {
  Plan plan = ragged_plan(10, 40 * 64);
  plan.boot = kBoot;
  return plan;
}

// Each row that can be drawn is whole.
void check_rows(SegmentMemory& m) {
  absorb(m);
  const std::string v = violation(m);
  BOOST_REQUIRE_MESSAGE(v.empty(), v);
  for (uint64_t slot = 0; slot < m.capacity(); slot++) {
    uint64_t number = 0;
    if (m.at(slot)) BOOST_REQUIRE((look_at(m, slot, kMost, number) == Found::kWhole));
  }
}

}  // namespace

BOOST_AUTO_TEST_CASE(values_of_any_length_come_back_and_pages_that_were_being_written_are_free) {
  for (const bool closed : {true, false}) {
    SegmentFile file(values_plan());
    append_ragged(file.memory(), join(file.memory(), Role::kWriter), 25, 0, kMost);
    absorb(file.memory());
    const std::vector<uint64_t> at(&file.memory().at(0), &file.memory().at(0) + 10);
    const int id = join(file.memory(), Role::kWriter);
    const uint64_t next = file.memory().header().page_head.load(), free = 40 - next % 40;
    SteppedRun run(file.memory(), id, 777, free >= 7 ? 60 : 3);
    for (int i = 0; i < 3; i++) run.advance();
    BOOST_TEST(busy_pages(file.memory()) == 1U);
    closed ? file.release() : file.abandon();
    BOOST_TEST(file.repair().dropped_rows == 0U);
    SegmentMemory& m = file.memory();
    BOOST_TEST(busy_pages(m) == 0U);
    BOOST_TEST(m.run_in_flight(id).first1.load() == 0U);
    check_rows(m);
    uint64_t kept = 0;
    for (uint64_t slot = 0; slot < 10; slot++) {
      BOOST_TEST((m.at(slot) == at[slot] || m.at(slot) == 0));  // the run that was begun has taken rows' pages
      kept += m.at(slot) && m.at(slot) == at[slot];
    }
    BOOST_TEST(kept + 4 > m.header().rows);
    BOOST_TEST(kept > 2U);
    append_ragged(m, join(m, Role::kWriter), 25, 100, kMost);
    check_rows(m);
  }
}

BOOST_AUTO_TEST_CASE(tampered_lengths_and_runs_are_refused_with_the_row_or_the_row_is_gone) {
  enum class Place { kLength, kRun, kPageWord, kOwner, kAbsorbedRun };
  for (const bool closed : {true, false})
    for (Place place : {Place::kLength, Place::kRun, Place::kPageWord, Place::kOwner, Place::kAbsorbedRun})
      for (int bit : {0, 2, 13, 30}) BOOST_TEST_CONTEXT((closed ? "closed, " : "") << int(place) << ", bit " << bit) {
          SegmentFile file(values_plan());
          append_ragged(file.memory(), join(file.memory(), Role::kWriter), 25, 0, kMost);
          absorb(file.memory());
          SegmentMemory& m = file.memory();
          uint64_t slot = 9;
          Run run;
          uint32_t lengths[2];
          while (!m.at(slot) || !read_run(m, slot, run, lengths) || run.pages < 2) slot--;
          const auto offset = [&](const void* at) {
            return static_cast<uint64_t>(static_cast<const char*>(at) - m.base());
          };
          const uint64_t page = m.page_of(run.first);
          const uint64_t at = place == Place::kLength     ? offset(m.length_of_row(slot, 0))
                              : place == Place::kRun      ? offset(m.run1_of_row(slot))
                              : place == Place::kPageWord ? offset(&m.page_word(page + 1))
                              : place == Place::kOwner    ? offset(&m.owner1(page))
                                                          : offset(&m.run1(slot));
          closed ? file.release() : file.abandon();
          file.flip(at + static_cast<uint64_t>(bit / 8), static_cast<uint8_t>(1U << bit % 8));
          const bool derived = place == Place::kOwner || place == Place::kAbsorbedRun;
          const bool leads_out = !derived && bit >= 13;
          try {
            file.repair();
          } catch (const NotASegment& e) {
            const std::string what = e.what();
            const bool names = what.find("row " + std::to_string(slot)) != what.npos ||
                               what.find("page " + std::to_string(page + 1)) != what.npos ||
                               what.find("rows of pages") != what.npos ||
                               what.find("lengths of the values") != what.npos;
            BOOST_TEST(names, what);
            BOOST_TEST((closed || leads_out));
            continue;
          }
          BOOST_TEST(!leads_out);
          BOOST_TEST((!closed || place == Place::kPageWord));  // who wrote a page is of no account
          // After a death of all nobody can tell a length or a run in the ring from that which was written.
          if (place == Place::kLength || place == Place::kRun)
            BOOST_TEST((!file.memory().at(slot) ||
                        (read_run(file.memory(), slot, run, lengths) && is_intact(file.memory(), run))));
          else
            check_rows(file.memory());
        }
}

BOOST_AUTO_TEST_CASE(random_damage_of_pages_is_refused_or_repaired) {
  std::mt19937_64 random(9);
  int refused = 0, repaired = 0;
  for (int k = 0; k < 300; k++) {
    SegmentFile file(values_plan());
    append_ragged(file.memory(), join(file.memory(), Role::kWriter), 25, 0, kMost);
    absorb(file.memory());
    const Layout layout = file.memory().layout();
    k % 2 ? file.release() : file.abandon();
    const Pages& p = layout.pages;
    const uint64_t starts[] = {offsetof(Header, page_head), layout.records, p.words, p.runs, p.owners, p.in_flight};
    const uint64_t bytes[] = {2 * kLine, 10 * layout.record_stride, 40 * 8, 10 * 8, 40 * 4, 8 * kRunInFlightBytes};
    const size_t region = random() % 6;
    for (uint64_t n = 1 + random() % 4; n > 0; n--)
      file.flip(starts[region] + random() % bytes[region], static_cast<uint8_t>(1U << random() % 8));
    try {
      file.repair();
    } catch (const NotASegment&) {
      refused++;
      continue;
    }
    repaired++;
    SegmentMemory& m = file.memory();
    for (uint64_t slot = 0; slot < m.capacity(); slot++) {
      uint64_t number = 0;
      if (m.at(slot)) look_at(m, slot, kMost, number);  // whatever it finds, nothing beside the ring
    }
    append_ragged(m, join(m, Role::kWriter), 60, 100, kMost);
    check_rows(m);
  }
  BOOST_TEST(refused > 50);
  BOOST_TEST(repaired > 50);
}

BOOST_AUTO_TEST_CASE(a_file_with_holes_on_a_full_disk_is_an_error_and_stays_as_it_is) {
  SegmentFile file;
  file.release();
  disk_is_full = true;
  BOOST_CHECK_EXCEPTION(repair_segment(file.descriptor(), kBoot, kAnother), std::system_error,
                        [](const std::system_error& e) { return e.code() == std::errc::no_space_on_device; });
  disk_is_full = false;
  BOOST_TEST((file.phase() == Phase::kSealed));
  BOOST_TEST(file.repair().nonce == kNonce);
}

// A file of which another was copied.
BOOST_AUTO_TEST_CASE(a_copy_at_rest_gets_another_nonce_and_one_in_use_is_refused) {
  for (const bool closed : {true, false}) {
    SegmentFile file;
    const uint64_t elsewhere = file.memory().file().place + 2;
    file.memory().file().place = elsewhere;
    closed ? file.release() : file.abandon();
    if (!closed) {
      BOOST_CHECK_THROW(file.repair(), NotASegment);
      continue;
    }
    BOOST_TEST(file.repair().nonce == kAnother);
    BOOST_TEST(file.memory().file().place == place_of(file.descriptor()));
    file.release();
    BOOST_TEST(repair_segment(file.descriptor(), kBoot, kAnother + 1).nonce == kAnother);
  }
}

BOOST_AUTO_TEST_CASE(a_copy_whose_first_opening_was_killed_gets_a_nonce_of_its_own) {
  SegmentFile file;
  file.release();
  {
    const auto memory = map_segment(file.descriptor());
    memory->file().phase = Phase::kCopied;
    detail::give_nonce(*memory, kAnother + 5);
  }
  BOOST_TEST(file.repair().nonce == kAnother);
}

BOOST_AUTO_TEST_SUITE_END()
