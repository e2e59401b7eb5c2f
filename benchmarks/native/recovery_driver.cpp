// Lets a learner die in the middle of its work, and times the first draw of the one that survives it. Compiled on the
// fly; called through ctypes.
#define TORCHREPLAY_FAULTS

#include <sys/mman.h>
#include <sys/wait.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "draw/batch_sampler.h"
#include "draw/priority_updater.h"
#include "segment/format.h"
#include "write/ring_writer.h"

namespace benchmarks {
namespace {

using torchreplay::Element;

constexpr int kBatch = 256;
constexpr uint64_t kStreams = 8;  // explorers whose rows are interleaved
constexpr uint64_t kEpisode = 1001;
constexpr uint64_t kNews = 200;  // rows written between two deaths

/// A full buffer of rows or of transitions, and what draws from it.
class Buffer {
 public:
  Buffer(uint64_t capacity, bool linked) : memory_(make(capacity, linked)), lanes_(kStreams) {
    write(capacity + capacity / 100);
    plan_.outputs = {{torchreplay::Output::Kind::kAnchor, 0, 0, 1, 0}};
    plan_.steps = 1;
    for (size_t output = 0; output < memory_->layout().fields.size(); ++output)
      values_.emplace_back(kBatch * memory_->layout().fields[output].nbytes);
    for (std::vector<char>& value : values_) out_.values.push_back(value.data());
    out_.keys = keys_;
    out_.weight = weight_;
    out_.probability = probability_;
    sampler_ = std::make_unique<torchreplay::BatchSampler>(*memory_, linked ? &plan_ : nullptr);
    draw();
  }

  /// Returns the seconds of a draw after a death at the `nth` passage of `point`; -1 when nobody died there.
  double recover(const char* point, uint64_t nth, bool updating) {
    write(kNews);
    const pid_t child = fork();
    if (child == 0) {
      torchreplay::fault::arm(point, nth);
      const std::vector<double> td(kBatch, 0.5);
      if (updating) torchreplay::PriorityUpdater(*memory_).update(kBatch, keys_, td.data());
      draw();
      _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) ||
        WEXITSTATUS(status) != torchreplay::fault::kExitStatus)
      return -1;
    const int64_t start = torchreplay::monotonic_ns();
    draw();
    return static_cast<double>(torchreplay::monotonic_ns() - start) * 1e-9;
  }

 private:
  static std::unique_ptr<torchreplay::SegmentMemory> make(uint64_t capacity, bool linked) {
    std::vector<torchreplay::Field> fields = {{Element::kF32, 16}, {Element::kF32, 16}, {Element::kI64, 8},
                                              {Element::kF32, 4},  {Element::kBool, 1}, {Element::kBool, 1}};
    torchreplay::View view;
    view.span = linked ? 1 : 0;
    torchreplay::SegmentConfig config;
    config.layout = torchreplay::make_layout(capacity, fields, view, torchreplay::config_bytes(fields.size(), 0));
    config.sampler = {1, torchreplay::Normalize::kBuffer, 0.6, 1e-6};
    config.nonce = 1;
    torchreplay::Descriptor fd(memfd_create("recovery", MFD_CLOEXEC));
    const auto bytes = static_cast<off_t>(config.layout.bytes);
    if (fd.get() < 0 || ftruncate(fd.get(), bytes) != 0) throw std::bad_alloc();
    torchreplay::take_huge_pages(fd, 0, config.layout.bytes);
    if (posix_fallocate(fd.get(), 0, bytes) != 0) throw std::bad_alloc();
    auto memory = torchreplay::format_segment(std::move(fd), config);
    torchreplay::publish_limit(*memory);
    return memory;
  }

  void write(uint64_t rows) {
    const bool linked = memory_->layout().view.linked();
    for (uint64_t row = 0; row < rows; ++row, ++written_) {
      Lane& lane = lanes_[written_ % kStreams];
      const uint64_t step = lane.rows++ % kEpisode;
      const uint64_t flags = step == 0 ? torchreplay::kFirst : step + 1 == kEpisode ? torchreplay::kTerminated : 0;
      const torchreplay::RowMeta meta =
          linked ? torchreplay::RowMeta{lane.key1 << 16U | flags, static_cast<uint32_t>(step), 0}
                 : torchreplay::RowMeta{};
      int64_t key = 0;
      uint64_t done = 0;
      torchreplay::RingWriter(*memory_, 1).append(1, &meta, &key, done, [&](uint64_t, uint64_t slot) {
        for (const torchreplay::Field& field : memory_->layout().fields)
          std::memset(memory_->value(field, slot), static_cast<int>(written_ & 0x7fU), field.nbytes);
      });
      lane.key1 = static_cast<uint64_t>(key) + 1;
    }
  }

  void draw() {
    torchreplay::Shortage shortage;
    sampler_->sample(kBatch, 0.4, {0, 0, step_++}, out_, shortage);
  }

  struct Lane {
    uint64_t key1 = 0, rows = 0;
  };
  std::unique_ptr<torchreplay::SegmentMemory> memory_;
  std::vector<Lane> lanes_;
  uint64_t written_ = 0, step_ = 0;
  torchreplay::ItemPlan plan_;
  std::vector<std::vector<char>> values_;
  int64_t keys_[kBatch];
  float weight_[kBatch], probability_[kBatch];
  torchreplay::BatchPointers out_;
  std::unique_ptr<torchreplay::BatchSampler> sampler_;
};

}  // namespace
}  // namespace benchmarks

extern "C" {

/// Returns a full buffer, or null when memory is short.
void* recovery_new(int64_t capacity, int linked) {
  try {
    return new benchmarks::Buffer(static_cast<uint64_t>(capacity), linked != 0);
  } catch (const std::exception&) {
    return nullptr;
  }
}

double recovery_absorbing(void* buffer, int64_t nth) {
  return static_cast<benchmarks::Buffer*>(buffer)->recover("adopt.rows", static_cast<uint64_t>(nth), false);
}
double recovery_updating(void* buffer, int64_t nth) {
  return static_cast<benchmarks::Buffer*>(buffer)->recover("tree.totals", static_cast<uint64_t>(nth), true);
}
void recovery_delete(void* buffer) { delete static_cast<benchmarks::Buffer*>(buffer); }
}
