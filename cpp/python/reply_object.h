// `_C.Exchange` and `_C.Reply`: the connections of a process to servers on other nodes, and what they bring.
#pragma once

#include "python/new_tensors.h"
#include "python/object.h"
#include "wire/exchange.h"

namespace torchreplay::py {

// What a forked child has of it is never destroyed: a thread that it has not got may have been at it.
template <class T>
void leave_to_parent(const std::shared_ptr<T>& shared) {
  static_cast<void>(new (std::nothrow) std::shared_ptr<T>(shared));
}

struct ExchangeObject {
  // A forked child has none of its threads and of its lock, nor may it end the connections.
  ~ExchangeObject() {
    if (!shared->here()) leave_to_parent(shared);
  }
  std::shared_ptr<Exchange> shared = std::make_shared<Exchange>();
};

inline Exchange& require_here(const std::shared_ptr<Exchange>& exchange) {
  if (!exchange->here()) throw std::runtime_error("a forked child has none of its parent's connections");
  return *exchange;
}

struct ReplyObject {
  ~ReplyObject() {
    if (!exchange->here()) leave_to_parent(exchange);
  }
  std::shared_ptr<Exchange> exchange;
  std::shared_ptr<Reply> reply;
};

namespace wire {

inline PyTypeObject* reply_type = nullptr;

inline PyObject* make_reply(std::shared_ptr<Exchange> exchange, std::shared_ptr<Reply> reply) {
  Ref object(checked(PyType_GenericAlloc(reply_type, 0)));
  install(object.get(), new ReplyObject{std::move(exchange), std::move(reply)});
  return object.release();
}

// Exchange()
inline int init_exchange(PyObject* self, PyObject*, PyObject*) {
  return as_status(guarded([&] {
    install(self, new ExchangeObject);
    return Py_NewRef(Py_None);
  }));
}

// wait(ns) -> whether it is there, after that time at most. A signal ends the wait, too.
inline PyObject* wait(PyObject* self, PyObject* ns) {
  return method<ReplyObject>(self, [&](ReplyObject& s) {
    if (s.reply->is_there()) return true;
    const int64_t limit = as_int(ns);
    const std::shared_ptr<Reply> reply = s.reply;
    const std::shared_ptr<Exchange> exchange = s.exchange;
    require_here(exchange);
    bool there;
    {
      const Unlocked others;
      there = exchange->wait(*reply, limit);
    }
    if (!there && PyErr_CheckSignals()) throw PythonError{};
    return there;
  });
}

inline Reply& require_there(ReplyObject& s) {
  if (!s.reply->is_there()) throw std::runtime_error("the reply is not there yet");
  return *s.reply;
}

// Whether it is there, and says nothing but that all is done.
inline bool is_well(const Reply& reply) { return reply.is_there() && reply.lost.empty() && reply.text.empty(); }

// body() -> uint8 tensor [bytes], once; None: the answer has none, or it was taken.
inline PyObject* body(ReplyObject& s) {
  Body& body = require_there(s).body;
  if (!body.data()) return Py_NewRef(Py_None);
  const auto bytes = static_cast<int64_t>(body.bytes());
  char* const data = body.data();
  return make_tensor(data, Element::kU8, 1, &bytes, nullptr, BlockOwner(body.release()));
}

inline PyObject* bytes_of(const std::string& text) {
  return checked(PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
}

inline PyGetSetDef exchange_getset[] = {
    {"carried", attribute<ExchangeObject, [](ExchangeObject& s) { return s.shared->carried(); }>, nullptr, nullptr,
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot exchange_slots[] = {{Py_tp_init, reinterpret_cast<void*>(init_exchange)},
                                       {Py_tp_dealloc, reinterpret_cast<void*>(dealloc<ExchangeObject>)},
                                       {Py_tp_getset, exchange_getset},
                                       {0, nullptr}};
inline PyType_Spec exchange_spec = type_spec<ExchangeObject>("torchreplay._C.Exchange", exchange_slots);

inline PyMethodDef reply_methods[] = {
    {"wait", wait, METH_O, nullptr},
    {"body", plain_method<ReplyObject, [](ReplyObject& s) { return body(s); }>, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};
inline PyGetSetDef reply_getset[] = {
    {"is_there", attribute<ReplyObject, [](ReplyObject& s) { return s.reply->is_there(); }>, nullptr, nullptr, nullptr},
    {"is_well", attribute<ReplyObject, [](ReplyObject& s) { return is_well(*s.reply); }>, nullptr, nullptr, nullptr},
    {"head", attribute<ReplyObject, [](ReplyObject& s) { return bytes_of(require_there(s).head); }>, nullptr, nullptr,
     nullptr},
    {"text", attribute<ReplyObject, [](ReplyObject& s) { return bytes_of(require_there(s).text); }>, nullptr, nullptr,
     nullptr},
    {"lost", attribute<ReplyObject, [](ReplyObject& s) { return require_there(s).lost; }>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};
inline PyType_Slot reply_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc<ReplyObject>)},
                                    {Py_tp_methods, reply_methods},
                                    {Py_tp_getset, reply_getset},
                                    {0, nullptr}};
inline PyType_Spec reply_spec = type_spec<ReplyObject>("torchreplay._C.Reply", reply_slots);

}  // namespace wire
}  // namespace torchreplay::py
