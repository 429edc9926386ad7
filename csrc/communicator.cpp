// See communicator.h.
#include "communicator.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "transport_mover.h"
#include "transport_shm.h"

namespace py = pybind11;

namespace tbik {

namespace {

// Never destroyed: the interpreter may be gone when static objects are.
PyTypeObject* g_ndarray = nullptr;
py::object* g_transport_error = nullptr;
py::object* g_transport_timeout = nullptr;

[[noreturn]] void raise(const TransportError& error) {
  const py::object& kind = error.failure == TransportFailure::kTimeout ? *g_transport_timeout : *g_transport_error;
  PyErr_SetString(kind.ptr(), (std::string("launch.allreduce: ") + error.what()).c_str());
  throw py::error_already_set();
}

// A buffer for as long as the object lives; false without one (no Python error is left).
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  bool acquire(py::handle object, int flags) {
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
      PyErr_Clear();
      return false;
    }
    held_ = true;
    return true;
  }
  const Py_buffer* operator->() const { return &view_; }

 private:
  Py_buffer view_{};
  bool held_ = false;
};

// 'f' and the like; 0 for anything that has no sum here, other byte orders included.
std::optional<Element> element_of(const Py_buffer& view, bool bfloat16) {
  if (view.format == nullptr || view.format[0] == 0 || view.format[1] != 0) return std::nullopt;
  const char kind = view.format[0];
  if (bfloat16) return kind == 'H' && view.itemsize == 2 ? std::optional(Element::kBFloat16) : std::nullopt;
  switch (kind) {
    case 'f':
      return Element::kFloat32;
    case 'd':
      return Element::kFloat64;
    case 'e':
      return Element::kFloat16;
    case 'b':
      return Element::kInt8;
    case 'B':
      return Element::kUInt8;
    case 'h':
    case 'i':
    case 'l':
    case 'q':
      break;
    case 'I':
    case 'L':
    case 'Q':
      break;  // a sum modulo 2^bits does not know signs
    default:
      return std::nullopt;
  }
  switch (view.itemsize) {
    case 2:
      return Element::kInt16;
    case 4:
      return Element::kInt32;
    case 8:
      return Element::kInt64;
    default:
      return std::nullopt;
  }
}

bool is(py::handle object, const char* text) {
  return PyUnicode_Check(object.ptr()) && PyUnicode_CompareWithASCIIString(object.ptr(), text) == 0;
}

// Of signedness and shape: what the collective's own tag does not hold.
uint64_t shape_of(const Py_buffer& view) {
  const char kind = view.format[0];
  uint64_t hash = 0xcbf29ce484222325 ^ static_cast<uint64_t>(kind == 'I' || kind == 'L' || kind == 'Q');
  for (int i = 0; i < view.ndim; ++i) hash = (hash ^ static_cast<uint64_t>(view.shape[i])) * 0x100000001b3;
  return hash * 0x100000001b3 ^ static_cast<uint64_t>(view.ndim);
}

}  // namespace

Communicator::Communicator(std::unique_ptr<Transport> transport, const Settings& settings, const Combine& combine,
                           double timeout_s)
    : transport_(std::move(transport)), collectives_(*transport_, settings, combine), timeout_s_(timeout_s) {}

void Communicator::set_limit(double timeout_s) {
  transport_->set_limit(std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9)));
}

Communicator::Outcome Communicator::all_reduce(py::handle array, py::handle out, py::handle op, py::handle dtype,
                                               py::handle timeout_s) {
  if (Py_TYPE(array.ptr()) != g_ndarray || Py_TYPE(out.ptr()) != g_ndarray) return kUnusual;
  const bool average = is(op, "avg");
  const bool bfloat16 = !dtype.is_none();
  if ((!average && !is(op, "sum")) || (bfloat16 && !is(dtype, "bfloat16"))) return kUnusual;
  double limit_s = timeout_s_;
  if (!timeout_s.is_none()) {
    limit_s = PyFloat_Check(timeout_s.ptr()) ? PyFloat_AS_DOUBLE(timeout_s.ptr()) : 0;
    if (!(limit_s > 0 && limit_s < 1e9)) return kUnusual;
  }
  const bool in_place = array.ptr() == out.ptr();
  Buffer from;
  Buffer to;
  if (!to.acquire(out, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE)) return kUnusual;
  if (!in_place && !from.acquire(array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)) return kUnusual;
  const Buffer& input = in_place ? to : from;
  const std::optional<Element> element = element_of(*input.operator->(), bfloat16);
  if (!element || (average && !is_float(*element))) return kUnusual;
  if (!in_place && (to->len != input->len || std::strcmp(to->format, input->format) != 0)) return kUnusual;

  Request request;
  request.op = average ? Op::kAvg : Op::kSum;
  request.element = *element;
  request.inputs = {input->buf};
  request.counts = {input->len / input->itemsize};
  request.out = to->buf;
  request.shape = shape_of(*input.operator->());
  std::optional<TransportError> failure;
  {
    const py::gil_scoped_release release;
    set_limit(limit_s);
    try {
      collectives_.run(request);
    } catch (const TransportError& error) {
      failure = error;
    }
  }
  if (!failure) return kDone;
  if (failure->failure == TransportFailure::kMismatch) return kDisagree;
  raise(*failure);
}

void Communicator::refuse(double timeout_s) {
  std::optional<TransportError> failure;
  {
    const py::gil_scoped_release release;
    set_limit(timeout_s);
    try {
      collectives_.barrier();
    } catch (const TransportError& error) {
      if (error.failure != TransportFailure::kMismatch) failure = error;
    }
  }
  if (failure) raise(*failure);
}

std::vector<py::bytes> Communicator::gather(const std::string& text, double timeout_s) {
  const int size = transport_->size();
  std::vector<std::string> texts(static_cast<size_t>(size));
  std::optional<TransportError> failure;
  {
    const py::gil_scoped_release release;
    set_limit(timeout_s);
    const int64_t room = std::min(kText, transport_->capacity());
    const int64_t length = std::min(static_cast<int64_t>(text.size()), room - 8);
    std::byte* message = transport_->outgoing();
    std::memcpy(message, &length, 8);
    std::memcpy(message + 8, text.data(), static_cast<size_t>(length));
    const Piece all{0, room};
    const std::vector<Part> parts{
        {std::vector<Piece>(static_cast<size_t>(size), all), std::vector<Piece>(static_cast<size_t>(size), all)}};
    Tag tag;
    tag.call = {~uint64_t{0}, ++gathers_};
    const Where where{"comparison of calls", gathers_, "what each rank asks for", 0, 1};
    try {
      transport_->exchange(tag, parts, where);
      for (int p = 0; p < size; ++p) {
        if (transport_->tag(p).call != tag.call) {
          throw TransportError(TransportFailure::kMisuse, describe(where, transport_->rank(), size) + ": rank " +
                                                              std::to_string(p) + " is in another call");
        }
        const std::byte* from = p == transport_->rank() ? message : transport_->incoming(p, 0);
        int64_t n = 0;
        std::memcpy(&n, from, 8);
        texts[static_cast<size_t>(p)].assign(reinterpret_cast<const char*>(from + 8),
                                             static_cast<size_t>(std::clamp<int64_t>(n, 0, room - 8)));
      }
    } catch (const TransportError& error) {
      failure = error;
    }
  }
  if (failure) raise(*failure);
  return {texts.begin(), texts.end()};
}

void Communicator::leave() {
  if (auto* shm = dynamic_cast<ShmTransport*>(transport_.get())) shm->leave();
}

namespace {

// The mover's Python function: move(to, from, what, limit_s), lists of memoryviews, None where there is nothing. What
// it raises: TransportTimeout and TransportError of tbik.errors keep their kind.
MoverTransport::Move move_of(py::object function) {
  const auto shared = std::shared_ptr<py::object>(new py::object(std::move(function)), [](py::object* p) {
    if (Py_IsInitialized() == 0) {
      p->release();
    } else {
      const py::gil_scoped_acquire gil;
      delete p;
      return;
    }
    delete p;
  });
  return [shared](const std::vector<Bytes>& to, const std::vector<Bytes>& from, const std::string& what,
                  std::chrono::nanoseconds limit) {
    const py::gil_scoped_acquire gil;
    const auto views = [](const std::vector<Bytes>& runs, bool readonly) {
      py::list list;
      for (const Bytes& run : runs) {
        list.append(run.size == 0 ? py::object(py::none())
                                  : py::object(py::memoryview::from_memory(run.data, run.size, readonly)));
      }
      return list;
    };
    try {
      (*shared)(views(to, true), views(from, false), what, std::chrono::duration<double>(limit).count());
    } catch (py::error_already_set& error) {
      if (error.matches(*g_transport_timeout)) {
        throw TransportError(TransportFailure::kTimeout, py::str(error.value()));
      }
      if (error.matches(PyExc_Exception)) {
        throw TransportError(TransportFailure::kPeerGone, py::str(error.value()));
      }
      throw;  // KeyboardInterrupt and the like
    }
  };
}

}  // namespace

std::unique_ptr<Transport> make_mover_transport(py::object function, const std::string& name, int rank, int size,
                                                int64_t capacity) {
  return std::make_unique<MoverTransport>(name, move_of(std::move(function)), rank, size, capacity);
}

void bind_communicator(py::module& m, const Combine& combine) {
  const py::module errors = py::module::import("tbik.errors");
  g_transport_error = new py::object(errors.attr("TransportError"));
  g_transport_timeout = new py::object(errors.attr("TransportTimeout"));
  g_ndarray = reinterpret_cast<PyTypeObject*>(py::object(py::module::import("numpy").attr("ndarray")).release().ptr());

  py::class_<Communicator>(m, "Communicator")
      .def(py::init([combine](std::shared_ptr<ShmRegion> region, const py::object& move, const std::string& name,
                              int rank, int size, double timeout_s, const std::string& placement,
                              int64_t one_shot_bytes, int64_t segment_bytes, int64_t capacity) {
             Settings settings;
             settings.placement = placement_of(placement);
             settings.one_shot_bytes = one_shot_bytes;
             settings.segment_bytes = segment_bytes;
             settings.single_bytes = std::max(settings.single_bytes, segment_bytes);
             std::unique_ptr<Transport> transport;
             if (region) {
               transport = std::make_unique<ShmTransport>(std::move(region), rank, size);
             } else {
               transport = make_mover_transport(move, name, rank, size, capacity);
             }
             return std::make_unique<Communicator>(std::move(transport), settings, combine, timeout_s);
           }),
           py::kw_only(), py::arg("region"), py::arg("move"), py::arg("name"), py::arg("rank"), py::arg("size"),
           py::arg("timeout_s"), py::arg("placement"), py::arg("one_shot_bytes"), py::arg("segment_bytes"),
           py::arg("capacity"))
      .def("all_reduce",
           [](Communicator& c, py::handle array, py::handle out, py::handle op, py::handle dtype,
              py::handle timeout_s) { return static_cast<int>(c.all_reduce(array, out, op, dtype, timeout_s)); })
      .def("refuse", &Communicator::refuse)
      .def("gather", &Communicator::gather)
      .def("leave", &Communicator::leave)
      .def_property_readonly("transport", [](const Communicator& c) { return std::string(c.transport().name()); })
      .def("placement", [](const Communicator& c, int64_t bytes) {
        return std::string(name_of(c.collectives().placement_for(Collective::kAllReduce, Element::kFloat32, bytes)));
      });
}

}  // namespace tbik
