// Segments in memory files of their own, and appends taken one step at a time.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "sanitized.h"
#include "segment/format.h"
#include "write/ring_writer.h"

namespace torchreplay::testing {

inline constexpr uint64_t kNonce = 0x1234567890abcdef;

inline Descriptor memory_file(uint64_t bytes) {
  Descriptor fd(memfd_create("torchreplay-test", MFD_CLOEXEC));
  if (fd.get() < 0 || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throw std::system_error(errno, std::generic_category(), "memfd");
  return fd;
}

struct Plan {
  uint64_t capacity = 8;
  std::vector<Field> fields = {{Element::kI64, 8}};
  View view;
  SamplerConfig sampler{1, Normalize::kBuffer, 0.6, 1e-6};
  LimiterConfig limiter{};
  uint64_t boot = 0;
  std::string text = "a description";
  std::vector<RaggedField> ragged = {};
  uint64_t ragged_bytes = 0;
};

inline SegmentConfig config_of(const Plan& plan) {
  SegmentConfig config;
  config.layout = make_layout(plan.capacity, plan.fields, plan.view,
                              config_bytes(plan.fields.size(), plan.text.size(), plan.ragged.size()), plan.ragged,
                              plan.ragged_bytes);
  config.sampler = plan.sampler;
  config.limiter = plan.limiter;
  config.nonce = kNonce;
  config.seed = 7;
  config.boot = plan.boot;
  config.text = plan.text;
  return config;
}

inline std::unique_ptr<SegmentMemory> make_segment(const Plan& plan = {}) {
  const SegmentConfig config = config_of(plan);
  auto memory = format_segment(memory_file(config.layout.bytes), config);
  memory->header().ticket_limit.store(kNever);
  return memory;
}

// Of every field, fills the value in `slot` with copies of the 8-byte `pattern`.
inline void fill_row(SegmentMemory& m, uint64_t slot, uint64_t pattern) {
  for (const Field& f : m.layout().fields)
    for (uint64_t i = 0; i < f.nbytes; i += 8)
      copy_payload(m.value(f, slot) + i, &pattern, std::min<uint64_t>(8, f.nbytes - i));
}

inline RowMeta meta_of(std::optional<float> priority) {
  return priority ? RowMeta{kHasPriority, 0, *priority} : RowMeta{};
}

// Writes one row through the ring and returns its key.
inline uint64_t append_row(SegmentMemory& m, int id, uint64_t pattern = 0, std::optional<float> priority = {}) {
  const RowMeta meta = meta_of(priority);
  int64_t key = -1;
  uint64_t written = 0;
  const Append outcome =
      RingWriter(m, id).append(1, &meta, &key, written, [&](uint64_t, uint64_t slot) { fill_row(m, slot, pattern); });
  if (outcome != Append::kDone) throw std::runtime_error("the row was not written");
  return static_cast<uint64_t>(key);
}

// A writer that may lag or die between any two steps of an append: ticket, busy, done.
class SteppedWriter {
 public:
  SteppedWriter(SegmentMemory& m, int id) : memory_(m), id_(id) {}

  int id() const { return id_; }
  uint64_t key() const { return key_; }
  uint64_t slot() const { return memory_.slot_of(key_); }

  uint64_t take_ticket() {
    key_ = memory_.header().head.fetch_add(1);
    memory_.participant(id_).first.store(key_);
    memory_.participant(id_).count.store(1);
    return key_;
  }

  // False: the ticket has met a hole.
  bool seize() {
    std::atomic<uint64_t>& word = memory_.row(slot()).word;
    const uint64_t now = word.load();
    if (slot_word::is_busy(now) || slot_word::key1(now) > key_) return false;
    word.store(slot_word::busy(key_, static_cast<uint64_t>(id_)));
    return true;
  }

  void finish(std::optional<float> priority = {}, uint64_t pattern = 0) {
    finish(meta_of(priority), [&](uint64_t slot) { fill_row(memory_, slot, pattern); });
  }

  // Calls fill(slot) to copy the payload.
  template <std::invocable<uint64_t> Fill>
  void finish(const RowMeta& meta, Fill&& fill) {
    RowHeader& row = memory_.row(slot());
    row.set(meta, memory_.layout().view.linked());
    fill(slot());
    row.word.store(slot_word::done(key_, static_cast<uint64_t>(id_)));
  }

 private:
  SegmentMemory& memory_;
  int id_;
  uint64_t key_ = 0;
};

}  // namespace torchreplay::testing
