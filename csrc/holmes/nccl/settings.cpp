#include "holmes/nccl/settings.hpp"

#include "holmes/core/error.hpp"

namespace holmes::nccl {

Config config_of(const Settings& settings, int version) {
  constexpr int first_with_names = 22700;
  Config config = make_config(version);
  config.blocking = 1;
  const auto refuse_version = [&](const std::string& given, int first_version) {
    if (version < first_version)
      throw UsageError(given + ": NCCL " + version_text(version) + " does not know it; use NCCL " +
                       version_text(first_version) + " or later, or leave it out");
  };
  const auto set = [&](int& field, const char* name, std::optional<int> value, int least, int first_version) {
    if (!value) return;
    const std::string given = "NCCL setting " + std::string(name) + "=" + std::to_string(*value);
    if (*value < least)
      throw UsageError(given + " is not possible; it must be " + std::to_string(least) + " or more, or left out");
    refuse_version(given, first_version);
    field = *value;
  };
  set(config.min_ctas, "min_ctas", settings.min_ctas, 1, oldest_version);
  set(config.max_ctas, "max_ctas", settings.max_ctas, 1, oldest_version);
  set(config.cga_cluster_size, "cga_cluster_size", settings.cga_cluster_size, 0, oldest_version);
  set(config.cta_policy, "cta_policy", settings.cta_policy, 0, 22700);
  set(config.traffic_class, "traffic_class", settings.traffic_class, 0, 22600);
  if (settings.min_ctas && settings.max_ctas && *settings.min_ctas > *settings.max_ctas)
    throw UsageError("NCCL setting min_ctas=" + std::to_string(*settings.min_ctas) +
                     " is more than max_ctas=" + std::to_string(*settings.max_ctas) + "; make it at most as many");
  if (settings.split_share) config.split_share = 1;
  if (!settings.comm_name.empty()) {
    refuse_version("NCCL setting comm_name='" + settings.comm_name + "'", first_with_names);
    config.comm_name = settings.comm_name.c_str();
  }
  return config;
}

}  // namespace holmes::nccl
