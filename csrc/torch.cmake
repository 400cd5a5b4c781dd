# The c10d backend holmes_comm._c10d. torch's headers and libraries are asked of the interpreter (torch's own CMake
# package wants CUDA where torch was built with it). The module names torch's libraries without a path: `import torch` has
# loaded them before.
execute_process(
  COMMAND ${CMAKE_COMMAND} -E env TORCH_DEVICE_BACKEND_AUTOLOAD=0
    ${Python_EXECUTABLE} -E -c
    "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__.split('+')[0], sep=';', end='')"
  OUTPUT_VARIABLE HOLMES_TORCH RESULT_VARIABLE HOLMES_TORCH_FAILED
  ERROR_VARIABLE HOLMES_TORCH_ERROR)
if(HOLMES_TORCH_FAILED)
  message(FATAL_ERROR "HOLMES_TORCH is ON but ${Python_EXECUTABLE} cannot import torch:\n${HOLMES_TORCH_ERROR}")
endif()
list(GET HOLMES_TORCH 0 HOLMES_TORCH_ROOT)
list(GET HOLMES_TORCH 1 HOLMES_TORCH_VERSION)
if(HOLMES_TORCH_VERSION VERSION_LESS 2.9)
  message(FATAL_ERROR "torch ${HOLMES_TORCH_VERSION} is too old for the torch.distributed backend: install torch 2.9 or "
    "newer, or build without it (-DHOLMES_TORCH=OFF)")
endif()
# Its classes change from one minor version to the next: holmes_comm/torch_backend.py compares before it loads the module.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/_c10d.torch "${HOLMES_TORCH_VERSION}")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_c10d.torch DESTINATION .)

add_library(_c10d MODULE
  c10d/device_stream.cpp
  c10d/device_communicators.cpp
  c10d/tensor_buffer.cpp
  c10d/serial_queue.cpp
  c10d/sparse.cpp
  c10d/torch_error.cpp
  c10d/store_adapter.cpp
  c10d/background.cpp
  c10d/work_holmes.cpp
  c10d/process_group_holmes.cpp
  c10d/collectives.cpp
  c10d/module.cpp)
target_include_directories(_c10d SYSTEM PRIVATE
  ${HOLMES_TORCH_ROOT}/include ${HOLMES_TORCH_ROOT}/include/torch/csrc/api/include)
target_compile_options(_c10d PRIVATE -Wall -Wextra -fvisibility=hidden)
# Parsing torch's headers is most of the work: once instead of for each source.
target_precompile_headers(_c10d PRIVATE
  <torch/csrc/utils/pybind.h> <torch/csrc/Exceptions.h> <torch/csrc/distributed/c10d/Backend.hpp>)
target_link_libraries(_c10d PRIVATE holmes Python::Module
  ${HOLMES_TORCH_ROOT}/lib/libtorch_python.so ${HOLMES_TORCH_ROOT}/lib/libtorch_cpu.so
  ${HOLMES_TORCH_ROOT}/lib/libc10.so)
set_target_properties(_c10d PROPERTIES PREFIX "" SUFFIX ".${Python_SOABI}.so" INSTALL_RPATH "$ORIGIN/lib")
install(TARGETS _c10d LIBRARY DESTINATION .)
