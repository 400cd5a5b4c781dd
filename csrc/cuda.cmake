# libholmes_cuda: the CUDA kernels, a library of its own with the CUDA runtime inside it, loaded with dlopen. Never
# required: HOLMES_CUDA=AUTO builds it where nvcc works with this host compiler.
set_property(CACHE HOLMES_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT HOLMES_CUDA)
  return()
endif()
if(HOLMES_SANITIZE)
  message(STATUS "CUDA kernels: not built with a sanitizer")
  return()
endif()

set(holmes_cuda_architectures ${CMAKE_CUDA_ARCHITECTURES})  # the user's, if any: enabling CUDA sets a default
include(CheckLanguage)
check_language(CUDA)  # compiles a file: the toolkit's headers and the host compiler are tried too
if(NOT CMAKE_CUDA_COMPILER)
  if(NOT HOLMES_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "HOLMES_CUDA=${HOLMES_CUDA}, but no nvcc works here. Set the environment variable CUDACXX to "
      "nvcc's path and, where it refuses the default g++, CUDAHOSTCXX to one it accepts; or use HOLMES_CUDA=AUTO or OFF.")
  endif()
  message(STATUS "CUDA kernels: not built, no working nvcc")
  return()
endif()
enable_language(CUDA)
if(NOT holmes_cuda_architectures)
  unset(CMAKE_CUDA_ARCHITECTURES CACHE)  # the default, which the next configuration would take for the user's
  # Machine code for the data centre GPUs, PTX for those to come.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 11.8)
    set(holmes_cuda_architectures 80-real 90)
  else()
    set(holmes_cuda_architectures 80)
  endif()
endif()
message(STATUS "CUDA kernels: nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${holmes_cuda_architectures}")

add_library(holmes_cuda SHARED
  kernels/launch.cu
  kernels/bucket_move.cu
  kernels/shard_sum.cu
  kernels/squared_norm.cu)
target_include_directories(holmes_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
# No fused multiply-add: the results are those of torch's and numpy's operations, bit for bit.
target_compile_options(holmes_cuda PRIVATE -Xcompiler=-Wall,-Wextra -fmad=false)
set_target_properties(holmes_cuda PROPERTIES
  CUDA_ARCHITECTURES "${holmes_cuda_architectures}"
  CUDA_STANDARD 17
  CUDA_STANDARD_REQUIRED ON
  CUDA_EXTENSIONS OFF
  CUDA_RUNTIME_LIBRARY Static
  CUDA_VISIBILITY_PRESET hidden
  LINK_OPTIONS "LINKER:--exclude-libs,ALL")
install(TARGETS holmes_cuda LIBRARY DESTINATION lib)

if(HOLMES_TESTS)  # here and not in tests/cpp: the language is enabled in this folder
  enable_testing()
  add_executable(test_pack ${PROJECT_SOURCE_DIR}/tests/cpp/test_pack.cu)
  target_include_directories(test_pack PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(test_pack PRIVATE ${CMAKE_DL_LIBS})
  set_target_properties(test_pack PROPERTIES
    CUDA_ARCHITECTURES "${holmes_cuda_architectures}"
    CUDA_STANDARD 17
    CUDA_RUNTIME_LIBRARY Static)
  add_test(NAME pack COMMAND test_pack $<TARGET_FILE:holmes_cuda>)
endif()
