# The Python modules: _C (pybind11), and the c10d backend where torch is.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)
pybind11_add_module(_C
  bindings/module.cpp
  bindings/dlpack.cpp
  bindings/held_object.cpp
  bindings/bind_buffer.cpp
  bindings/bind_comm.cpp
  bindings/bind_debug.cpp
  bindings/torch_tensor.cpp
  bindings/bind_discover.cpp
  bindings/bind_error.cpp
  bindings/bind_nccl.cpp
  bindings/bind_nic_choice.cpp
  bindings/bind_options.cpp
  bindings/bind_shared_buffer.cpp
  bindings/bind_store.cpp
  bindings/bind_work.cpp
  bindings/device_buffer.cpp)
target_link_libraries(_C PRIVATE holmes)
# pybind11's headers are most of the work: two compilations in place of sixteen.
set_target_properties(_C PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8 INSTALL_RPATH "$ORIGIN/lib")
install(TARGETS _C LIBRARY DESTINATION .)
if(HOLMES_TORCH)
  add_subdirectory(c10d)
endif()
# What `holmes build-torch` compiles.
install(DIRECTORY c10d DESTINATION c10d/source FILES_MATCHING PATTERN "*.?pp" PATTERN "CMakeLists.txt")
install(DIRECTORY bindings DESTINATION c10d/source FILES_MATCHING PATTERN "*.hpp")
