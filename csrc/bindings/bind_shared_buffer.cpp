#include "bindings/bindings.hpp"
#include "holmes/transport/shared_buffer.hpp"

namespace py = pybind11;
using namespace py::literals;

void bind_shared_buffer(py::module_& module) {
  using holmes::SharedBuffer;
  py::class_<SharedBuffer>(module, "SharedBuffer", py::buffer_protocol(),
                           "Memory that the other ranks of this host read where it is (the buffer protocol gives it as "
                           "bytes). Use it through holmes_comm.empty.")
      .def(py::init<std::size_t>(), "bytes"_a,
           "Zeros. Local. Raises UsageError for 0 bytes, SystemError where there is no memory or descriptor.")
      .def_buffer([](const SharedBuffer& buffer) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(buffer.data()),
                               static_cast<py::ssize_t>(buffer.bytes()));
      });
}
