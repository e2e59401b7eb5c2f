// `_C.Link`: one connection to a server on another node.
#pragma once

#include "python/reply_object.h"

namespace torchreplay::py {

struct LinkObject {
  LinkObject(std::shared_ptr<Exchange> of, int socket, size_t head_bytes)
      : exchange(std::move(of)), link(std::make_shared<Link>(socket, head_bytes)) {
    require_here(exchange).add(link);
  }
  ~LinkObject() {
    if (exchange->here())
      exchange->close(link);
    else
      leave_to_parent(exchange);
  }
  std::shared_ptr<Exchange> exchange;
  std::shared_ptr<Link> link;
};

namespace wire {

// Link(exchange, socket, head_bytes): a connected socket, of which it has a descriptor of its own. The head of each
// answer has so many bytes behind its start.
inline int init_link(PyObject* self, PyObject* args, PyObject*) {
  return as_status(guarded([&] {
    PyObject* exchange;
    int socket, head_bytes;
    if (!PyArg_ParseTuple(args, "Oii", &exchange, &socket, &head_bytes)) throw PythonError{};
    install(self, new LinkObject(state_of<ExchangeObject>(exchange).shared, socket, static_cast<size_t>(head_bytes)));
    return Py_NewRef(Py_None);
  }));
}

inline std::string joined(PyObject* const* parts, Py_ssize_t count) {
  std::string request;
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_buffer view;
    if (PyObject_GetBuffer(parts[i], &view, PyBUF_SIMPLE)) throw PythonError{};
    request.append(static_cast<const char*>(view.buf), static_cast<size_t>(view.len));
    PyBuffer_Release(&view);
  }
  return request;
}

// ask(exact, *parts) -> Reply. `exact`: bytes of the answer's body, if it has one; 0: any. The parts are contiguous
// buffers.
inline PyObject* ask(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return method<LinkObject>(self, [&](LinkObject& s) {
    if (nargs < 2) expect_args("ask", nargs, 2);
    const auto reply = std::make_shared<Reply>(as_uint(args[0]));
    std::string request = joined(args + 1, nargs - 1);
    Ref object(make_reply(s.exchange, reply));
    const std::shared_ptr<Exchange> exchange = s.exchange;
    const std::shared_ptr<Link> link = s.link;
    require_here(exchange);
    {
      const Unlocked others;
      exchange->ask({{link, std::move(request), reply}});
    }
    return object.release();
  });
}

inline std::string broken(LinkObject& s) {
  require_here(s.exchange);
  const Unlocked others;
  return s.exchange->broken(s.link);
}

// Ends the connection. In a forked child it is the parent's, and goes on.
inline void close(LinkObject& s) {
  if (!s.exchange->here()) return;
  const std::shared_ptr<Exchange> exchange = s.exchange;
  const std::shared_ptr<Link> link = s.link;
  const Unlocked others;
  exchange->close(link);
}

inline PyMethodDef link_methods[] = {
    {"ask", fast(ask), METH_FASTCALL, nullptr},
    {"broken", plain_method<LinkObject, [](LinkObject& s) { return broken(s); }>, METH_NOARGS, nullptr},
    {"close", plain_method<LinkObject, [](LinkObject& s) { close(s); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyType_Slot link_slots[] = {{Py_tp_init, reinterpret_cast<void*>(init_link)},
                                   {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<LinkObject>)},
                                   {Py_tp_methods, link_methods},
                                   {0, nullptr}};
inline PyType_Spec link_spec = type_spec<LinkObject>("torchreplay._C.Link", link_slots);

}  // namespace wire
}  // namespace torchreplay::py
