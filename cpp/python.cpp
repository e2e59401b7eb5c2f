// torchreplay._C: the calls that explorers and learners make per step, on CPython's limited API. It checks, releases
// the interpreter lock and converts; every algorithm lives in the core headers.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "python/episode_calls.h"
#include "python/faults.h"
#include "python/import_object.h"
#include "python/limiter_calls.h"
#include "python/prefetcher_object.h"
#include "python/reader_object.h"
#include "python/regions.h"
#include "python/segment_object.h"
#include "python/shard_service_object.h"
#include "python/tally_objects.h"
#include "python/union_shards_object.h"
#include "python/weights_object.h"
#include "system/checksum.h"

namespace torchreplay::py {
namespace {

// init_arrays(torch.Tensor, torch.as_tensor, torch.get_num_threads, numpy.ndarray, astype)
PyObject* init_arrays(PyObject*, PyObject* args) {
  return guarded([&] {
    PyObject *type, *convert, *threads, *array, *cast;
    if (!PyArg_ParseTuple(args, "OOOOO", &type, &convert, &threads, &array, &cast)) throw PythonError{};
    Ref capsule(PyObject_GetAttrString(type, "__dlpack_c_exchange_api__"));
    if (!capsule) throw PythonError{};
    auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api"));
    if (!api) throw PythonError{};
    if (api->header.version.major != DLPACK_MAJOR_VERSION || !api->dltensor_from_py_object_no_sync)
      throw std::runtime_error(
          "this torch speaks another version of DLPack's exchange API: torchreplay needs torch 2.11 or later");
    exchange = api;
    tensor_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
    as_tensor = Py_NewRef(convert);
    get_num_threads = Py_NewRef(threads);
    array_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(array));
    astype = Py_NewRef(cast);
    return Py_NewRef(Py_None);
  });
}

// init_waits(ReplayTimeout, Stopped, report, every): how waits for the lock end, and what long ones call every so many
// seconds.
PyObject* init_waits(PyObject*, PyObject* args) {
  return guarded([&] {
    PyObject *timeout, *stopped, *callable;
    double every;
    if (!PyArg_ParseTuple(args, "OOOd", &timeout, &stopped, &callable, &every)) throw PythonError{};
    timeout_type = Py_NewRef(timeout);
    stopped_type = Py_NewRef(stopped);
    report = Py_NewRef(callable);
    report_every_ns = static_cast<int64_t>(every * 1e9);
    report_wait = report_to_log;
    interrupted = signal_pending;
    return Py_NewRef(Py_None);
  });
}

// segment_layout(capacity, fields, view, text_bytes) -> (int, [(int, int)]): the size of the file that
// Segment(create=True) expects, and the arrays of large fields in it: first byte, bytes of a slot.
PyObject* segment_layout(PyObject*, PyObject* args) {
  return guarded([&] {
    unsigned long long capacity, text;
    PyObject *list, *view;
    if (!PyArg_ParseTuple(args, "KOOK", &capacity, &list, &view, &text)) throw PythonError{};
    const Fields fields = Fields::parse(list);
    const Layout layout = segment::Shape::parse(view).layout_of(capacity, fields, text);
    const Ref arrays(checked(PyList_New(0)));
    for (const Field& f : layout.fields) {
      if (!f.own_array) continue;
      const Ref array(checked(
          Py_BuildValue("KK", static_cast<unsigned long long>(f.offset), static_cast<unsigned long long>(f.stride))));
      if (PyList_Append(arrays.get(), array.get()) < 0) throw PythonError{};
    }
    return checked(Py_BuildValue("KO", static_cast<unsigned long long>(layout.bytes), arrays.get()));
  });
}

// weights_bytes(buffer_bytes) -> int: the size of the file that Weights(create=True) expects.
PyObject* weights_bytes(PyObject*, PyObject* bytes) {
  return guarded([&] { return checked(PyLong_FromUnsignedLongLong(WeightsMemory::bytes(as_uint(bytes)))); });
}

// take_huge_pages(fd, offset, bytes) -> bool
PyObject* take_huge_pages(PyObject*, PyObject* args) {
  return guarded([&] {
    int fd;
    unsigned long long offset, bytes;
    if (!PyArg_ParseTuple(args, "iKK", &fd, &offset, &bytes)) throw PythonError{};
    const Descriptor file = Descriptor::duplicate(fd);
    const bool taken = [&] {
      const Unlocked released;
      return torchreplay::take_huge_pages(file, offset, bytes);
    }();
    return PyBool_FromLong(taken);
  });
}

// checksum(bytes, before) -> int: of bytes that follow on those with checksum `before`; 0: on none.
PyObject* checksum(PyObject*, PyObject* args) {
  return guarded([&] {
    Py_buffer view;
    unsigned int before;
    if (!PyArg_ParseTuple(args, "y*I", &view, &before)) throw PythonError{};
    const uint32_t sum = [&] {
      const Unlocked released;
      return torchreplay::checksum(view.buf, static_cast<size_t>(view.len), before);
    }();
    PyBuffer_Release(&view);
    return checked(PyLong_FromUnsignedLong(sum));
  });
}

// nonce_in_use(fd, boot) -> int | None: of the segment in a file, when processes of this boot may use it. The caller
// holds LOCK_SH.
PyObject* nonce_in_use(PyObject*, PyObject* args) {
  return guarded([&] {
    int fd;
    unsigned long long boot;
    if (!PyArg_ParseTuple(args, "iK", &fd, &boot)) throw PythonError{};
    const auto nonce = torchreplay::nonce_in_use(Descriptor::duplicate(fd), boot);
    return nonce ? checked(PyLong_FromUnsignedLongLong(*nonce)) : Py_NewRef(Py_None);
  });
}

// repair_file(fd, boot, nonce) -> (nonce, rows dropped): makes the segment in a file fit for use; a copy of another
// file gets `nonce`. The caller holds LOCK_EX.
PyObject* repair_file(PyObject*, PyObject* args) {
  return guarded([&] {
    int fd;
    unsigned long long boot, nonce;
    if (!PyArg_ParseTuple(args, "iKK", &fd, &boot, &nonce)) throw PythonError{};
    Descriptor file = Descriptor::duplicate(fd);
    const Repaired repaired = [&] {
      const Unlocked released;
      return repair_segment(std::move(file), boot, nonce);
    }();
    return checked(Py_BuildValue("KK", repaired.nonce, repaired.dropped_rows));
  });
}

// machine_ns() -> int: a monotonic time that all processes of this machine share, also in containers with clocks of
// their own.
PyObject* machine_ns(PyObject*, PyObject*) {
  return guarded([&] { return checked(PyLong_FromLongLong(torchreplay::machine_ns())); });
}

// published_version(fd) -> int: of the shared weights in a file, which may be open for reading only.
PyObject* published_version(PyObject*, PyObject* fd) {
  return guarded([&] {
    const Descriptor file = Descriptor::duplicate(static_cast<int>(as_int(fd)));
    return checked(PyLong_FromUnsignedLongLong(torchreplay::published_version(file)));
  });
}

// rename_new(old, new): as os.rename, but a file that is there already is an error. Where the filesystem cannot do that
// in one step, there are both names for a moment.
PyObject* rename_new(PyObject*, PyObject* args) {
  return guarded([&] {
    const char *from, *to;
    if (!PyArg_ParseTuple(args, "yy", &from, &to)) throw PythonError{};
    if (renameat2(AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return Py_NewRef(Py_None);
    if (errno != EINVAL && errno != ENOSYS) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, to);
    if (link(from, to) || unlink(from)) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, to);
    return Py_NewRef(Py_None);
  });
}

// leave_files(): for a process that comes to its end without the interpreter's, such as children of multiprocessing;
// where the interpreter ends, it happens after that. Every segment in a file becomes a private copy for all its holders
// here. The file is marked as closed if nobody else uses it.
PyObject* leave_files(PyObject*, PyObject*) {
  return guarded([&] {
    const auto kept = AttachedSegment::keep_all();
    const Unlocked unlocked;  // it may wait for a disk
    AttachedSegment::leave_files(kept);
    return Py_NewRef(Py_None);
  });
}

// let_threads_sleep(): for the thread that is about to end the interpreter. The others, once they can have its lock no
// more, sleep until the process is gone.
PyObject* let_threads_sleep(PyObject*, PyObject*) {
  let_threads_sleep_at_the_end();
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"init_arrays", init_arrays, METH_VARARGS, nullptr},
    {"init_waits", init_waits, METH_VARARGS, nullptr},
    {"segment_layout", segment_layout, METH_VARARGS, nullptr},
    {"segment_regions", segment_regions, METH_VARARGS, nullptr},
    {"simd", simd, METH_NOARGS, nullptr},
    {"weights_bytes", weights_bytes, METH_O, nullptr},
    {"take_huge_pages", take_huge_pages, METH_VARARGS, nullptr},
    {"checksum", checksum, METH_VARARGS, nullptr},
    {"nonce_in_use", nonce_in_use, METH_VARARGS, nullptr},
    {"repair_file", repair_file, METH_VARARGS, nullptr},
    {"leave_files", leave_files, METH_NOARGS, nullptr},
    {"let_threads_sleep", let_threads_sleep, METH_NOARGS, nullptr},
    {"rename_new", rename_new, METH_VARARGS, nullptr},
    {"machine_ns", machine_ns, METH_NOARGS, nullptr},
    {"published_version", published_version, METH_O, nullptr},
    {"figure_names", segment::figure_names, METH_NOARGS, nullptr},
    {"limiter_needed", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(limiter::needed)), METH_FASTCALL, nullptr},
    {"limiter_admitted", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(limiter::admitted)), METH_FASTCALL,
     nullptr},
    {"limiter_start", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(limiter::start)), METH_FASTCALL, nullptr},
#ifdef TORCHREPLAY_FAULTS
    {"fault_points", fault_points, METH_NOARGS, nullptr},
    {"arm_fault", arm_fault, METH_VARARGS, nullptr},
#endif
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "torchreplay._C", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

PyObject* make_module() {
  return guarded([&] {
    guard_clients_by_gil();
    Ref m(checked(PyModule_Create(&module)));
    for (PyType_Spec* spec : {&segment::spec, &importing::spec, &prefetcher::spec, &writer::spec, &weights::spec,
                              &reader::spec, &wire::exchange_spec, &wire::link_spec, &wire::reply_spec,
                              &union_draw::spec, &union_shards::spec, &union_shards::draws_spec, &shard_service::spec,
                              &tally::tally_spec, &tally::steps_spec, &tally::round_spec}) {
      Ref type(checked(PyType_FromSpec(spec)));
      if (spec == &union_draw::spec) union_draw::type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.get()));
      if (spec == &tally::steps_spec) tally::steps_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.get()));
      if (spec == &tally::round_spec) tally::round_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.get()));
      if (spec == &wire::reply_spec) wire::reply_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type.get()));
      if (PyModule_AddType(m.get(), reinterpret_cast<PyTypeObject*>(type.get()))) throw PythonError{};
    }
    // After all exit handlers: what they write is in the file.
    const auto at_exit = [] {
      // There is no interpreter any more that waits could call.
      interrupted = [] { return false; };
      report_wait = [](const std::string&) { return false; };
      caller_lock = {};
      try {
        AttachedSegment::leave_files(AttachedSegment::keep_all());
      } catch (...) {  // not sealed
      }
    };
    if (Py_AtExit(at_exit)) throw std::runtime_error("too many functions to call at exit");
    return m.release();
  });
}

}  // namespace
}  // namespace torchreplay::py

PyMODINIT_FUNC PyInit__C() { return torchreplay::py::make_module(); }
