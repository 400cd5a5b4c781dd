// nccl::Settings for Python: a dict of what is set, by the names of holmes_comm.NcclSettings. Shared by both modules.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "holmes/nccl/settings.hpp"

namespace holmes {

inline nccl::Settings settings_of(const pybind11::dict& given) {
  nccl::Settings settings;
  const auto set = [&]<typename Field>(const char* name, Field& field) {
    if (given.contains(name)) field = given[name].cast<Field>();
  };
  set("min_ctas", settings.min_ctas);
  set("max_ctas", settings.max_ctas);
  set("cga_cluster_size", settings.cga_cluster_size);
  set("cta_policy", settings.cta_policy);
  set("traffic_class", settings.traffic_class);
  set("comm_name", settings.comm_name);
  set("high_priority", settings.high_priority);
  set("split_share", settings.split_share);
  return settings;
}

}  // namespace holmes
