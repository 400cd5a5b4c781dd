# The kernels once per instruction set, from the same source; reduce.cpp chooses at run time.
# Contraction (fused multiply-add) is off so that all of them round alike.
target_sources(holmes PRIVATE holmes/reduce/copy.cpp)

set(optimization -O3)
if(HOLMES_SANITIZE) # compiled in half the time
  set(optimization "")
endif()

function(holmes_add_kernels isa)
  add_library(holmes_kernels_${isa} OBJECT holmes/reduce/reduce_kernels.cpp)
  target_include_directories(holmes_kernels_${isa} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_definitions(holmes_kernels_${isa} PRIVATE HOLMES_ISA=${isa})
  target_compile_options(holmes_kernels_${isa} PRIVATE -Wall -Wextra -Wpedantic ${optimization} -ffp-contract=off ${ARGN})
  target_sources(holmes PRIVATE $<TARGET_OBJECTS:holmes_kernels_${isa}>)
endfunction()

holmes_add_kernels(baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  holmes_add_kernels(avx2 -mavx2 -mf16c)
  holmes_add_kernels(avx512 -mavx2 -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  target_compile_definitions(holmes PRIVATE HOLMES_X86_KERNELS)
endif()
