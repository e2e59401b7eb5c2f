// torchreplay._ops: the tree, the ring and packed batches as registered torch operators, on LibTorch's stable ABI.

#include <torch/csrc/stable/library.h>

#include "ops/pack.h"
#include "ops/ring_ops.h"
#include "ops/tree_ops.h"

STABLE_TORCH_LIBRARY(torchreplay, m) {
  m.def("tree_layout(int capacity) -> (int, int)");
  m.def("tree_set(Tensor(a!) memory, int capacity, Tensor index, Tensor priority) -> ()");
  m.def("tree_get(Tensor memory, int capacity, Tensor index) -> Tensor");
  m.def("tree_find(Tensor memory, int capacity, Tensor target) -> (Tensor, Tensor)");
  m.def("tree_sample(Tensor memory, int capacity, SymInt n, int seed, int stream, SymInt step) -> (Tensor, Tensor)");
  m.def("tree_rebuild(Tensor(a!) memory, int capacity) -> ()");
  m.def("tree_restore(Tensor(a!) memory, int capacity, Tensor grid) -> ()");
  m.def("tree_grid(Tensor memory, int capacity) -> Tensor");
  m.def("tree_unit(Tensor memory, int capacity) -> Tensor");
  m.def("tree_total(Tensor memory, int capacity) -> Tensor");
  m.def("tree_count(Tensor memory, int capacity) -> Tensor");
  m.def("tree_min(Tensor memory, int capacity) -> Tensor");
  m.def("ring_attach(int fd, int nonce, Tensor plan, Tensor rates) -> Tensor");
  m.def("ring_detach(int nonce) -> ()");
  m.def(
      "ring_sample(Tensor(a!) ring, Tensor beta, Tensor(b!)[] fields, Tensor(c!) key, Tensor(d!) weight, "
      "Tensor(e!) probability) -> ()");
  m.def("ring_update_priorities(Tensor(a!) ring, Tensor key, Tensor td) -> ()");
  m.def("ring_size(Tensor(a!) ring) -> Tensor");
  m.def("_unpack(Tensor(a) block, Tensor places) -> Tensor(a)[]");
}

// For every device, so that a tensor on the wrong one meets the check here and not the dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(torchreplay, CompositeExplicitAutograd, m) {
  m.impl("tree_layout", TORCH_BOX(&torchreplay::ops::tree_layout));
  m.impl("tree_set", TORCH_BOX(&torchreplay::ops::tree_set));
  m.impl("tree_get", TORCH_BOX(&torchreplay::ops::tree_get));
  m.impl("tree_find", TORCH_BOX(&torchreplay::ops::tree_find));
  m.impl("tree_sample", TORCH_BOX(&torchreplay::ops::tree_sample));
  m.impl("tree_rebuild", TORCH_BOX(&torchreplay::ops::tree_rebuild));
  m.impl("tree_restore", TORCH_BOX(&torchreplay::ops::tree_restore));
  m.impl("tree_grid", TORCH_BOX(&torchreplay::ops::tree_grid));
  m.impl("tree_unit", TORCH_BOX(&torchreplay::ops::tree_unit));
  m.impl("tree_total", TORCH_BOX(&torchreplay::ops::tree_total));
  m.impl("tree_count", TORCH_BOX(&torchreplay::ops::tree_count));
  m.impl("tree_min", TORCH_BOX(&torchreplay::ops::tree_min));
  m.impl("ring_attach", TORCH_BOX(&torchreplay::ops::ring_attach));
  m.impl("ring_detach", TORCH_BOX(&torchreplay::ops::ring_detach));
  m.impl("ring_sample", TORCH_BOX(&torchreplay::ops::ring_sample));
  m.impl("ring_update_priorities", TORCH_BOX(&torchreplay::ops::ring_update_priorities));
  m.impl("ring_size", TORCH_BOX(&torchreplay::ops::ring_size));
}

// It has no fake, and none for tensors without memory: torch.compile leaves it to Python.
STABLE_TORCH_LIBRARY_IMPL(torchreplay, CPU, m) { m.impl("_unpack", TORCH_BOX(&torchreplay::ops::unpack)); }
STABLE_TORCH_LIBRARY_IMPL(torchreplay, CUDA, m) { m.impl("_unpack", TORCH_BOX(&torchreplay::ops::unpack)); }
