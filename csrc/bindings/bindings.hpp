// The parts of the module holmes_comm._C, one per concept.
#pragma once

#include <pybind11/pybind11.h>

void bind_debug(pybind11::module_& module);
void bind_comm(pybind11::module_& module);
void bind_compression(pybind11::module_& module);
void bind_discover(pybind11::module_& module);
void bind_env(pybind11::module_& module);
void bind_error(pybind11::module_& module);
void bind_nccl(pybind11::module_& module);
void bind_nic_choice(pybind11::module_& module);
void bind_options(pybind11::module_& module);
void bind_store(pybind11::module_& module);
void bind_work(pybind11::module_& module);
