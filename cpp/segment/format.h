// Making a segment, and opening one that another process made. Checks everything before anything is trusted.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "segment/segment_memory.h"

namespace torchreplay {

// The file is not a segment that this build can use. The message says in which way.
struct NotASegment : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct SegmentConfig {
  Layout layout;
  SamplerConfig sampler;
  LimiterConfig limiter;
  uint64_t nonce = 0;
  uint64_t seed = 0;
  uint64_t boot = 0;  // of the machine, when the segment is to outlive its processes; 0: it is not
  std::string text;   // the Python side's description of itself
};

namespace detail {

// The binary part of the config region, before the text: what make_layout() needs.
struct ConfigHead {
  uint64_t capacity;
  View view;
  uint64_t fields;
  uint64_t ragged, ragged_bytes;
  uint64_t text_bytes;
};
struct ConfigField {
  uint64_t element;
  uint64_t nbytes;
};
struct ConfigRagged {
  uint64_t element;
  uint64_t nbytes;
  uint64_t group;
};
inline constexpr uint64_t kMaxFields = 4096;
inline constexpr uint64_t kMaxConfigBytes = 64 << 20;

}  // namespace detail

inline uint64_t config_bytes(size_t fields, size_t text, size_t ragged = 0) {
  return sizeof(detail::ConfigHead) + fields * sizeof(detail::ConfigField) + ragged * sizeof(detail::ConfigRagged) +
         text;
}

// Of what stays as it was formatted, and decides how everything else is read.
inline uint64_t config_hash(const Header& h, const char* config, uint64_t nonce) {
  const SamplerConfig& s = h.sampler;
  return Hash()
      .mix(config, h.config_bytes)
      .mix(nonce)
      .mix(s.prioritized)
      .mix(static_cast<uint64_t>(s.normalize))
      .mix(&s.alpha, sizeof s.alpha)
      .mix(&s.eps, sizeof s.eps)
      .mix(static_cast<uint64_t>(s.initial))
      .mix(&s.initial_raw, sizeof s.initial_raw)
      .mix(s.epochs)
      .mix(s.queue)
      .mix(s.drop_oldest)
      .mix(s.max_draws)
      .mix(s.window)
      .mix(s.max_age1)
      .value();
}

// Names the file: no two files of one time have the same. Never 0.
inline uint64_t place_of(const Descriptor& fd) {
  struct stat file;
  if (fstat(fd.get(), &file) != 0) throw std::system_error(errno, std::generic_category(), "fstat on a replay segment");
  Hash hash;
  hash.mix(uint64_t{file.st_dev}).mix(uint64_t{file.st_ino});
  struct statx born;  // not known everywhere; the number of a removed file is given again
  if (statx(fd.get(), "", AT_EMPTY_PATH, STATX_BTIME, &born) == 0 && born.stx_mask & STATX_BTIME)
    hash.mix(static_cast<uint64_t>(born.stx_btime.tv_sec)).mix(uint64_t{born.stx_btime.tv_nsec});
  return hash.value() | 1;
}

// Formats the zero-filled file `fd`, `config.layout.bytes` long.
inline std::unique_ptr<SegmentMemory> format_segment(Descriptor fd, const SegmentConfig& config) {
  const uint64_t place = config.boot ? place_of(fd) : 0;
  auto memory = std::make_unique<SegmentMemory>(std::move(fd), config.layout, config.text);
  const Layout& layout = memory->layout();
  char* at = memory->config();
  const auto write = [&at](const auto& part) {
    std::memcpy(at, &part, sizeof part);
    at += sizeof part;
  };
  write(detail::ConfigHead{layout.capacity, layout.view, layout.fixed_fields(), layout.ragged.size(),
                           layout.pages.count * layout.pages.bytes, config.text.size()});
  for (size_t i = 0; i < layout.fixed_fields(); i++)
    write(detail::ConfigField{static_cast<uint64_t>(layout.fields[i].element), layout.fields[i].nbytes});
  for (const RaggedField& f : layout.ragged)
    write(detail::ConfigRagged{static_cast<uint64_t>(f.element), f.nbytes, f.group});
  std::memcpy(at, config.text.data(), config.text.size());
  Header& h = memory->header();
  h.version = kFormatVersion;
  h.layout_hash = layout.hash();
  h.nonce = config.nonce;
  h.bytes = layout.bytes;
  h.config_bytes = layout.config_bytes;
  h.seed = config.seed;
  h.sampler = config.sampler;
  h.config_hash = config_hash(h, memory->config(), h.nonce);
  h.limiters[0] = config.limiter;
  h.made = machine_ns();
  h.max_raw = 1.0f;
  h.wake_at.store(kNever, std::memory_order_relaxed);
  h.page_limit.store(config.sampler.makes_writers_wait() ? layout.pages.count : kMaxKeys, std::memory_order_relaxed);
  h.gate.init();
  h.streams.store(1, std::memory_order_relaxed);  // stream 0 is the owner's
  h.mutex.init();
  memory->tree().rebuild();
  memory->file().boot = config.boot;
  memory->file().place = place;
  memory->file().phase = config.boot ? Phase::kInUse : Phase::kMemory;
  h.magic = kMagic;
  memory->expect_random_access();
  return memory;
}

// The first page of a file that claims to be a segment of this version.
class HeaderPage {
 public:
  // Throws NotASegment.
  explicit HeaderPage(const Descriptor& fd) {
    const uint64_t size = fd.file_bytes();
    if (size < sizeof page_ || pread(fd.get(), page_, sizeof page_, 0) != static_cast<ssize_t>(sizeof page_))
      throw NotASegment("the file is " + std::to_string(size) + " bytes long: too short for a replay segment");
    if (header().magic != kMagic) throw NotASegment("the file is not a replay segment (wrong magic number)");
    if (header().version != kFormatVersion)
      throw NotASegment("the segment has format version " + std::to_string(header().version) +
                        ", this build reads version " + std::to_string(kFormatVersion) +
                        ": use the same torchreplay version in every process");
  }
  const Header& header() const { return *reinterpret_cast<const Header*>(page_); }
  const FileState& file() const { return *reinterpret_cast<const FileState*>(page_ + kFileState); }

 private:
  alignas(kLine) char page_[kSegmentHeaderBytes];
};

// What a segment says of itself.
struct Description {
  Layout layout;
  std::string text;  // the Python side's
};

// Reads it, of a segment in use or not. Throws NotASegment, naming what is wrong with it.
inline Description read_description(const Descriptor& fd) {
  const HeaderPage page(fd);
  const Header& h = page.header();
  const uint64_t size = fd.file_bytes();
  if (h.bytes != size)
    throw NotASegment("the segment is " + std::to_string(size) + " bytes long, its header says " +
                      std::to_string(h.bytes));
  const uint64_t offset = kSegmentHeaderBytes + kMaxParticipants * kParticipantBytes;
  if (size < offset || h.config_bytes > std::min(size - offset, detail::kMaxConfigBytes))
    throw NotASegment("the segment's configuration is damaged");
  std::string config(h.config_bytes, '\0');
  if (pread(fd.get(), config.data(), config.size(), static_cast<off_t>(offset)) != static_cast<ssize_t>(config.size()))
    throw NotASegment("the segment's configuration cannot be read");
  if (config_hash(h, config.data(), h.nonce) != h.config_hash)
    throw NotASegment("the segment's configuration is damaged");
  detail::ConfigHead head;
  if (config.size() < sizeof head) throw NotASegment("the segment's configuration is damaged");
  std::memcpy(&head, config.data(), sizeof head);
  if (head.fields > detail::kMaxFields || head.ragged > detail::kMaxFields || head.text_bytes > config.size() ||
      config_bytes(head.fields, head.text_bytes, head.ragged) != config.size() || head.view.stride < 1 ||
      head.view.min_steps < 1)
    throw NotASegment("the segment's configuration is damaged");
  std::vector<Field> fields(head.fields);
  for (size_t i = 0; i < fields.size(); i++) {
    detail::ConfigField field;
    std::memcpy(&field, config.data() + sizeof head + i * sizeof field, sizeof field);
    if (field.element >= kElements) throw NotASegment("the segment has a field of an unknown element type");
    fields[i].element = static_cast<Element>(field.element);
    fields[i].nbytes = field.nbytes;
  }
  std::vector<RaggedField> ragged(head.ragged);
  for (size_t i = 0; i < ragged.size(); i++) {
    detail::ConfigRagged field;
    std::memcpy(&field, config.data() + config_bytes(head.fields, 0, i), sizeof field);
    if (field.element >= kElements) throw NotASegment("the segment has a field of an unknown element type");
    if (field.group >= ragged.size()) throw NotASegment("the segment's configuration is damaged");
    ragged[i] = {static_cast<Element>(field.element), field.nbytes, static_cast<uint32_t>(field.group)};
  }
  Layout layout;
  try {
    layout =
        make_layout(head.capacity, std::move(fields), head.view, h.config_bytes, std::move(ragged), head.ragged_bytes);
  } catch (const std::invalid_argument&) {
    throw NotASegment("the segment's configuration is damaged");
  }
  if (layout.hash() != h.layout_hash || layout.bytes != size)
    throw NotASegment(
        "the segment was laid out by an incompatible build of torchreplay: use the same version in every process");
  return {std::move(layout), config.substr(config.size() - head.text_bytes)};
}

// Maps a segment, in use or not. Throws NotASegment, naming what is wrong with it.
inline std::unique_ptr<SegmentMemory> map_segment(Descriptor fd) {
  Description found = read_description(fd);  // others may write to it from here on: what was checked is kept
  return std::make_unique<SegmentMemory>(std::move(fd), std::move(found.layout), std::move(found.text));
}

// Maps a segment that others use. Throws NotASegment, naming what differs.
inline std::unique_ptr<SegmentMemory> open_segment(Descriptor fd, uint64_t nonce) {
  const HeaderPage page(fd);
  if (page.header().nonce != nonce)
    throw NotASegment("the handle names another buffer than the one found in its place: its owner is gone");
  const Phase phase = page.file().phase.load(std::memory_order_acquire);
  if (phase != Phase::kMemory && phase != Phase::kInUse)
    throw NotASegment("the last process that used the buffer has closed it: open its file again");
  try {
    page.header().mutex.require_same_namespace();
  } catch (const OtherNamespace& e) {
    throw NotASegment(e.what());
  }
  auto memory = map_segment(std::move(fd));
  memory->expect_random_access();
  return memory;
}

}  // namespace torchreplay
