// Holmes as NCCL's network plugin, as the engine loads it for groups of its own: what names it, what it is told.
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <optional>

#include "check.hpp"
#include "holmes/core/error.hpp"
#include "holmes/nccl/net_plugin.hpp"

using namespace holmes;
using namespace holmes::nccl;

namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

UniqueId id_of(char first) {
  UniqueId id{};
  for (std::size_t i = 0; i < sizeof(id.internal); ++i) id.internal[i] = static_cast<char>(first + i);
  return id;
}

std::string refused(const std::function<void()>& body) {
  try {
    body();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

// By getHash of NCCL 2.30.7's own bitops.h.
void test_hash() {
  CHECK(hash_of(UniqueId{}) == 0xcc976ec6c24bb53c);
  CHECK(hash_of(id_of(1)) == 0xc8a3edfcf8c26f6c);
}

void test_names() {
  const NetPlugin& plugin = NetPlugin::get();
  CHECK(&NetPlugin::get() == &plugin && std::filesystem::exists(plugin.path()));
  for (const char* named : {"holmes", "libnccl-net-holmes.so", "aws-ofi,holmes", "holmes,aws-ofi"})
    CHECK(plugin.is_named_by(named));
  for (const char* other : {"", "none", "Holmes", " holmes", "holmes ", "aws-ofi", "libnccl-net.so", "a,,b"})
    CHECK(!plugin.is_named_by(other));
  CHECK(plugin.is_named_by(plugin.path()) && plugin.is_named_by("x," + plugin.path()));
  const auto folder = std::filesystem::path(plugin.path()).parent_path();
  CHECK(plugin.is_named_by(folder / "." / "libnccl-net-holmes.so") && !plugin.is_named_by(folder / "libholmes.so"));
  CHECK(!plugin.is_named_by("/there/is/none/libnccl-net-holmes.so"));
}

void test_what_it_cannot() {
  const NetPlugin& plugin = NetPlugin::get();
  const auto problem = [&](const Profile& profile) { return refused([&] { plugin.check(profile); }); };
  CHECK(problem({.net = Net::plugin, .interfaces = {"lo"}}).empty());
  CHECK(contains(problem({.net = Net::plugin, .interfaces = {"none0"}}), "none0"));
  const Profile contradicts{.net = Net::plugin, .interfaces = {"lo"}, .variables = {{"NCCL_NET_PLUGIN", "x"}}};
  CHECK(contains(problem(contradicts), "nccl_variables has NCCL_NET_PLUGIN"));
}

void test_assignments() {
  const NetPlugin& plugin = NetPlugin::get();
  using Names = std::vector<std::string>;
  const UniqueId id = id_of(3);
  std::optional<NetPlugin::Assignment> first;
  first.emplace(plugin, id, Names{"lo"});
  CHECK(!first->was_heeded());
  {
    const NetPlugin::Assignment second(plugin, id, Names{"lo"});  // another rank of the process
    const NetPlugin::Assignment other(plugin, id_of(4), Names{"eth9"});
  }
  const std::string sentence = refused([&] { NetPlugin::Assignment(plugin, id, Names{"lo", "eth9"}); });
  CHECK(contains(sentence, "two ranks of one process") && contains(sentence, "lo,rails:1 and lo,eth9,rails:2"));
  first.reset();
  const NetPlugin::Assignment again(plugin, id, Names{"lo", "eth9"});
}

}  // namespace

int main() {
  ::setenv("HOLMES_HOSTNAME", "here", 1);
  test_hash();
  test_names();
  test_what_it_cannot();
  test_assignments();
  return test::result("test_nccl_plugin");
}
