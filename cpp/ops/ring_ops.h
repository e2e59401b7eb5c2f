// Drawing from a shared ring and feeding back to it, as operators. A ring is named by an int64 tensor: the state of one
// stream of draws, which every operator declares to change. That orders them in a compiled graph, and lets none be
// dropped, merged or moved.
#pragma once

#include <climits>
#include <cmath>
#include <vector>

#include "draw/batch_sampler.h"
#include "draw/priority_updater.h"
#include "ops/attached_rings.h"
#include "ops/tensor_checks.h"

namespace torchreplay::ops {

// What the elements of a ring tensor mean.
struct RingState {
  int64_t nonce;    // of the segment
  int64_t process;  // whose stream it is: another process, forked or given the tensor, takes a new one
  int64_t stream;
  int64_t step;  // number of the next draw
};
inline constexpr int64_t kRingElements = sizeof(RingState) / sizeof(int64_t);

// A ring tensor, checked, and the segment that it names.
struct NamedRing {
  std::shared_ptr<AttachedRing> attached;
  RingState* state;
  Attachment& segment() const { return *attached->segment; }
  SegmentMemory& memory() const { return segment().memory(); }
};

// Starts a stream of draws of this process.
inline void start_stream(RingState& state, int64_t nonce, Attachment& segment) {
  state = {nonce, getpid(), segment.take_stream(), 0};
}

inline NamedRing ring_of(const Tensor& ring) {
  check_vector(ring, "ring", ScalarType::Long);
  if (ring.numel() != kRingElements) fail("ring has ", ring.numel(), " elements, expected ", kRingElements);
  auto* state = reinterpret_cast<RingState*>(longs(ring));
  auto attached = AttachedRings::of_process().find(state->nonce);
  if (!attached)
    fail("ring names no buffer that is attached in this process: make one here with torchreplay.ops.Ring(buffer)");
  if (state->process != getpid()) start_stream(*state, state->nonce, *attached->segment);
  return {std::move(attached), state};
}

inline DrawName name_of_draw(const NamedRing& ring) {
  const auto [nonce, process, stream, step] = *ring.state;
  if (stream < 0 || stream > UINT32_MAX) fail("the stream in ring is ", stream, ", expected 0 to 2**32 - 1");
  if (step < 0 || step >= static_cast<int64_t>(Philox::kLimit))
    fail("the step in ring is ", step, ", expected 0 to 2**48 - 1");
  return {ring.segment().seed(), static_cast<uint32_t>(stream), static_cast<uint64_t>(step)};
}

// From the numbers [steps, goal, discount_field, (kind, field, first, count, goal_field) of every output] and [gamma,
// share]; all empty for rows that are not linked.
inline ItemPlan plan_of(const Tensor& numbers, const Tensor& rates) {
  constexpr int64_t kHead = 3, kEach = 5;
  check_vector(numbers, "plan", ScalarType::Long);
  check_vector(rates, "rates", ScalarType::Double);
  const int64_t n = numbers.numel();
  if (n == 0) return {};
  if (n < kHead || (n - kHead) % kEach || rates.numel() != 2)
    fail("plan has ", n, " elements, and rates ", rates.numel());
  const int64_t* at = longs(numbers);
  const auto* rate = static_cast<const double*>(rates.const_data_ptr());
  ItemPlan plan{{},      static_cast<uint32_t>(at[0]), rate[0], static_cast<Goal>(at[1]),
                rate[1], static_cast<int32_t>(at[2])};
  for (at += kHead; at < longs(numbers) + n; at += kEach)
    plan.outputs.push_back({static_cast<Output::Kind>(at[0]), static_cast<uint32_t>(at[1]), static_cast<int32_t>(at[2]),
                            static_cast<uint32_t>(at[3]), static_cast<uint32_t>(at[4])});
  return plan;
}

inline Tensor ring_attach(int64_t fd, int64_t nonce, const Tensor& numbers, const Tensor& rates) {
  if (fd < 0 || fd > INT_MAX) fail("fd is ", fd, ", expected an open descriptor of a replay buffer");
  Tensor ring = empty(kRingElements, ScalarType::Long);
  try {
    const auto attached = AttachedRings::of_process().attach(static_cast<int>(fd), nonce, plan_of(numbers, rates));
    start_stream(*reinterpret_cast<RingState*>(longs(ring)), nonce, *attached->segment);
    return ring;
  } catch (const NotASegment& e) {
    fail(e.what());
  } catch (const std::system_error& e) {
    fail("fd is ", fd, ", expected an open descriptor of a replay buffer: ", e.what());
  }
}

inline void ring_detach(int64_t nonce) {
  if (!AttachedRings::of_process().detach(nonce)) fail("no buffer with the nonce ", nonce, " is attached");
}

// What the f-th tensor of a batch holds.
struct OutputType {
  Element element;
  uint64_t nbytes;  // of one item's value
};

inline std::vector<OutputType> outputs_of(const AttachedRing& ring) {
  const Layout& layout = ring.segment->memory().layout();
  std::vector<OutputType> types;
  if (const ItemPlan* plan = ring.segment->plan())
    for (size_t o = 0; o < plan->outputs.size(); o++)
      types.push_back({plan->element(o, layout), plan->item_bytes(o, layout)});
  else
    for (const Field& f : layout.fields) types.push_back({f.element, f.nbytes});
  return types;
}

// Throws unless `tensor` can hold `n` values of the f-th output.
inline void check_field(const Tensor& tensor, size_t f, const OutputType& type, int64_t n) {
  const ScalarType dtype = kScalarTypes[static_cast<size_t>(type.element)];
  const int64_t elements = static_cast<int64_t>(type.nbytes) / item_size(type.element);
  if (!tensor.is_cpu()) fail("fields[", f, "] is not on the CPU: draw there, and move the batch");
  if (tensor.scalar_type() != dtype) fail("fields[", f, "] is ", tensor.scalar_type(), ", expected ", dtype);
  if (tensor.dim() < 1 || tensor.size(0) != n || tensor.numel() != n * elements)
    fail("fields[", f, "] has ", tensor.numel(), " elements, expected a leading dimension of ", n, " with ", elements,
         " elements in each");
  if (!tensor.is_contiguous()) fail("fields[", f, "] is not contiguous");
}

// The memory of a batch's tensors, which must fit the outputs.
inline BatchPointers pointers_of(const std::vector<Tensor>& fields, const Tensor& key, const Tensor& weight,
                                 const Tensor& probability, const AttachedRing& ring) {
  check_vector(key, "key", ScalarType::Long);
  check_vector(weight, "weight", ScalarType::Float);
  check_vector(probability, "probability", ScalarType::Float);
  const int64_t n = key.numel();
  if (n < 1) fail("key is empty, expected as many elements as there are items to draw");
  if (weight.numel() != n || probability.numel() != n)
    fail("weight has ", weight.numel(), " elements and probability ", probability.numel(), "; expected ", n,
         ", as many as key");
  const std::vector<OutputType> types = outputs_of(ring);
  if (fields.size() != types.size()) fail(fields.size(), " fields were given, the batch has ", types.size());
  BatchPointers out{{}, longs(key), floats(weight), floats(probability)};
  for (size_t f = 0; f < fields.size(); f++) {
    check_field(fields[f], f, types[f], n);
    out.values.push_back(static_cast<char*>(fields[f].mutable_data_ptr()));
    out.bytes += types[f].nbytes * static_cast<uint64_t>(n);
  }
  return out;
}

// Throws for every outcome but a batch.
inline void check_drawn(Draw outcome, int n, const Shortage& shortage, const SegmentMemory& memory) {
  std::ostringstream text;
  switch (outcome) {
    case Draw::kDone:
      return;
    case Draw::kStopped:
      throw std::runtime_error("the replay buffer was stopped");
    case Draw::kWait:
      text << "drawing " << n << " items would have to wait: " << shortage.inserted << " items were inserted, "
           << shortage.needed << " are needed and " << shortage.drawable
           << " can be drawn; an operator never waits: call buffer.sample() first, which does";
      break;
    case Draw::kBarren:
      text << "a whole turn of the ring's " << memory.capacity() << " rows completed no item: choose a larger capacity";
      break;
    case Draw::kLapped:
      text << "the ring turns faster than a batch is copied: " << memory.capacity() << " rows against batches of " << n
           << "; choose a larger capacity, or slow the explorers with SamplesPerInsert";
      break;
    case Draw::kEpochEnds:
    case Draw::kEpochOver:
      text << "the epoch is over";  // of draws that are bounded to some
  }
  throw std::runtime_error(text.str());
}

// A tensor and not a number: torch.compile would compile a number in, and beta is annealed.
inline double exponent_of(const Tensor& beta) {
  if (!beta.is_cpu() || beta.scalar_type() != ScalarType::Double || beta.dim() != 0)
    fail("beta is a ", beta.dim(), "-dimensional tensor of ", beta.scalar_type(), ", expected a scalar of ",
         ScalarType::Double, " on the CPU");
  const double value = *static_cast<const double*>(beta.const_data_ptr());
  if (!std::isfinite(value) || value < 0) fail("beta is ", value, ", expected a finite number >= 0");
  return value;
}

inline void ring_sample(const Tensor& ring, const Tensor& beta, const std::vector<Tensor>& fields, const Tensor& key,
                        const Tensor& weight, const Tensor& probability) {
  const NamedRing named = ring_of(ring);
  const DrawName draw = name_of_draw(named);
  const double exponent = exponent_of(beta);
  SegmentMemory& memory = named.memory();
  const BatchPointers out = pointers_of(fields, key, weight, probability, *named.attached);
  const auto n = static_cast<int>(key.numel());
  Participant& learner = AttachedRings::of_process().become_learner(*named.attached);
  BatchSampler sampler(memory, named.segment().plan());
  Shortage shortage;
  const Draw outcome = sampler.sample(n, exponent, draw, out, shortage);
  if (sampler.pending()) reclaim_dead(memory);
  check_drawn(outcome, n, shortage, memory);
  note_draw(learner, n);
  named.state->step++;
}

// TD errors of any real dtype and stride, as doubles.
inline std::vector<double> td_errors(const Tensor& td, int64_t n) {
  if (td.dim() == 2 && td.size(0) == n && (td.size(1) == 1 || td.size(1) == n))
    fail("td has shape [", n, ", ", td.size(1), "], expected [", n, "]: give ",
         td.size(1) == 1 ? "td.squeeze(-1)" : "value.squeeze(-1) - target: a column was broadcast");
  check_row_of_numbers(td, "td");
  const auto* type = std::find(std::begin(kScalarTypes), std::end(kScalarTypes), td.scalar_type());
  if (type == std::end(kScalarTypes)) fail("td is ", td.scalar_type(), ", expected a real dtype");
  if (td.numel() != n) fail("td has ", td.numel(), " elements, expected one for each of ", n, " keys");
  StridedArray array;
  array.data = static_cast<const char*>(td.const_data_ptr());
  array.element = static_cast<Element>(type - kScalarTypes);
  array.dims = 1;
  array.shape[0] = n;
  array.stride[0] = td.stride(0) * item_size(array.element);
  std::vector<double> values(static_cast<size_t>(n));
  copy_converted(reinterpret_cast<char*>(values.data()), Element::kF64, array.data, array, 0);
  const auto bad = std::count_if(values.begin(), values.end(), [](double v) { return !std::isfinite(v); });
  if (bad > 0) {
    const auto first = std::find_if(values.begin(), values.end(), [](double v) { return !std::isfinite(v); });
    fail(bad, " of ", n, " TD errors are NaN or infinite, the first at index ", first - values.begin(),
         ": nothing was applied; look for a diverged loss");
  }
  return values;
}

inline void ring_update_priorities(const Tensor& ring, const Tensor& key, const Tensor& td) {
  const NamedRing named = ring_of(ring);
  check_vector(key, "key", ScalarType::Long);
  const int64_t n = key.numel();
  const std::vector<double> errors = td_errors(td, n);
  const auto bad =
      PriorityUpdater(named.memory()).update(n, static_cast<const int64_t*>(key.const_data_ptr()), errors.data());
  if (bad)
    fail("key[", bad->index, "] is ", bad->key, ", which this buffer never issued: ", bad->expected(),
         "; nothing was applied");
}

inline Tensor ring_size(const Tensor& ring) {
  const NamedRing named = ring_of(ring);
  Tensor size = scalar(ScalarType::Long);
  *longs(size) = static_cast<int64_t>(named.segment().refresh({}));
  return size;
}

}  // namespace torchreplay::ops
