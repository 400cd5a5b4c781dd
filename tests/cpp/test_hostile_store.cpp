// A store that rewrites what ranks told each other: an error naming the field on every rank, never a connection.
#include <ranges>

#include "holmes/bootstrap/handshake.hpp"
#include "holmes/bootstrap/nic_agreement.hpp"
#include "holmes/bootstrap/sha256.hpp"
#include "mesh_ranks.hpp"

using namespace holmes;
using namespace holmes::test;

namespace {

constexpr int ranks = 3;
const std::string secret = "a secret of this job alone";

std::vector<std::string> fields_of(const std::string& bytes) {
  const std::string writer = "the test";
  FieldReader reader(bytes, writer);
  std::vector<std::string> fields;
  while (!reader.at_end()) fields.push_back(reader.text());
  return fields;
}

std::string bytes_of(const std::vector<std::string>& fields) {
  FieldWriter writer;
  for (const auto& field : fields) writer.add(field);
  return writer.take();
}

std::string changed(const std::string& value) {
  if (value.empty() || value.find_first_not_of("0123456789") != std::string::npos) return value + "x";
  return value == "0" ? "1" : "0";
}

// How `key` reads instead of what was written; who writes it does not notice.
class RewritingStore final : public Store {
public:
  using Rewrite = std::function<std::string(const std::string&)>;
  RewritingStore(std::shared_ptr<Store> inner, std::string key, Rewrite rewrite)
      : inner_(std::move(inner)), key_(std::move(key)), rewrite_(std::move(rewrite)) {}
  void set(const std::string& key, const std::string& value) override { inner_->set(key, value); }
  std::string get(const std::string& key, Duration timeout) override {
    const auto value = inner_->get(key, timeout);
    return key == key_ ? rewrite_(value) : value;
  }
  void wait(const std::string& key, Duration timeout) override { inner_->wait(key, timeout); }

private:
  std::shared_ptr<Store> inner_;
  std::string key_;
  Rewrite rewrite_;
};

// Changes one sealed field of the last part of a value, or of one so many before it. `forged_key`: and proves it, as
// can be done where no secret was given.
RewritingStore::Rewrite change_sealed(std::size_t position, const std::string& forged_key = "",
                                      std::size_t before_last = 0) {
  return [=](const std::string& bytes) {
    auto outer = fields_of(bytes);
    std::string& part = outer.at(outer.size() - 1 - before_last);
    auto inner = fields_of(part);
    const std::string value = changed(inner.at(2 * position));
    if (forged_key.empty()) {
      inner[2 * position] = value;
    } else {
      SealedWriter writer({"", forged_key});
      for (std::size_t i = 0; i < inner.size() / 2; ++i) writer.add(i == position ? value : inner[2 * i]);
      inner = fields_of(writer.take());
    }
    part = bytes_of(inner);
    return bytes_of(outer);
  };
}

// The same for one rank's record among those that rank 0 passes on.
RewritingStore::Rewrite change_passed_on(int writer, const RewritingStore::Rewrite& rewrite) {
  return [=](const std::string& bytes) {
    auto fields = fields_of(bytes);
    const auto at = static_cast<std::size_t>(writer) + 1;
    if (at >= fields.size()) return bytes;  // why rank 0 could not
    fields[at] = rewrite(fields[at]);
    return bytes_of(fields);
  };
}

CommunicatorOptions encrypted(const std::string& given) {
  CommunicatorOptions options{.transport = Transport::tcp, .connect_timeout = 5s, .secret = given};
  options.tls = TlsMode::all;
  return options;
}

std::size_t sealed_count() {
  const auto store = make_local_store();
  RewritingStore keeping(store, "", nullptr);  // and removes nothing
  auto outcomes = run_ranks(ranks, encrypted(secret), nullptr, store, [&](int) -> Store& { return keeping; });
  check_pairs(outcomes, false, 1);
  return fields_of(fields_of(store->get("world/rank/1", 1s)).back()).size() / 2;
}

// One field of a record changed, where rank 0 reads it or in what it passes on to all others, or to rank `only`.
void test_field_of_a_record(int writer, std::size_t field, bool passed_on, int only = -1) {
  const auto rewrite = change_sealed(field);
  const auto store = make_local_store();
  RewritingStore hostile(store, passed_on ? "world/records" : "world/rank/" + std::to_string(writer),
                         passed_on ? change_passed_on(writer, rewrite) : rewrite);
  const auto outcomes = run_ranks(ranks, encrypted(secret), nullptr, store, [&](int rank) -> Store& {
    return only < 0 || rank == only ? static_cast<Store&>(hostile) : *store;
  });
  check_all_fail(outcomes, ErrorKind::protocol,
                 {"rank " + std::to_string(writer) + " wrote into the store was changed there: the field '"});
}

void test_each_field_of_a_record() {
  constexpr std::size_t tls = 6;
  const std::size_t count = sealed_count();
  CHECK(count == 25);
  for (int writer = 0; writer < ranks; ++writer) {
    for (std::size_t field = 0; field < count; ++field) test_field_of_a_record(writer, field, false);
    std::vector<std::jthread> cases;  // rank 0 hears of it after a second
    for (std::size_t field = 0; field < count; ++field)
      cases.emplace_back([=] { test_field_of_a_record(writer, field, true); });
    cases.emplace_back([=] { test_field_of_a_record(writer, tls, true, 2); });
    cases.emplace_back([=] { test_field_of_a_record(writer, tls, false, 0); });
  }
}

// Records left out, said twice or followed by another.
void test_what_is_passed_on() {
  const std::vector<std::function<void(std::vector<std::string>&)>> changes = {
      [](auto& fields) { fields.pop_back(); }, [](auto& fields) { fields.push_back(fields.back()); },
      [](auto& fields) { fields.at(2) = fields.at(3); }, [](auto& fields) { fields.front() = "x"; },
      [](auto& fields) { fields.clear(); }};
  for (const auto& change : changes) {
    const auto store = make_local_store();
    RewritingStore hostile(store, "world/records", [&](const std::string& bytes) {
      auto fields = fields_of(bytes);
      change(fields);
      return bytes_of(fields);
    });
    const auto outcomes = run_ranks(ranks, encrypted(secret), nullptr, store, [&](int) -> Store& { return hostile; });
    for (const auto& outcome : outcomes) CHECK(!outcome.mesh && outcome.kind == ErrorKind::protocol);
  }
}

void test_the_header_of_a_record() {
  for (std::size_t field = 0; field < 4; ++field) {
    const auto store = make_local_store();
    RewritingStore hostile(store, "world/rank/1", [&](const std::string& bytes) {
      auto fields = fields_of(bytes);
      fields[field] = changed(fields[field]);
      return bytes_of(fields);
    });
    const auto outcomes = run_ranks(ranks, encrypted(secret), nullptr, store, [&](int) -> Store& { return hostile; });
    for (const auto& outcome : outcomes) CHECK(!outcome.mesh && outcome.message.find("rank 1") != std::string::npos);
  }
}

// What the issue was: every record says "no TLS".
void test_tls_is_not_switched_off() {
  constexpr std::size_t tls = 6;
  for (const std::string& given : {secret, std::string()}) {
    const auto store = make_local_store();
    std::shared_ptr<Store> view = store;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string key = "world/rank/" + std::to_string(rank);
      const auto rewrite = change_sealed(tls, given.empty() ? key : "");
      view = std::make_shared<RewritingStore>(view, key, rewrite);
      view = std::make_shared<RewritingStore>(view, "world/records", change_passed_on(rank, rewrite));
    }
    const auto outcomes = run_ranks(ranks, encrypted(given), nullptr, view);
    check_all_fail(outcomes, ErrorKind::protocol, {"the field 'tls'"});
  }
}

// Without a given secret anybody can forge a record: for one reader only, so that its writer does not see it.
void test_different_records_do_not_connect() {
  constexpr std::size_t host = 0;
  const auto store = make_local_store();
  RewritingStore hostile(store, "world/records", change_passed_on(1, change_sealed(host, "world/rank/1")));
  const auto outcomes = run_ranks(ranks, encrypted(""), nullptr, store, [&](int rank) -> Store& {
    return rank == 2 ? static_cast<Store&>(hostile) : *store;
  });
  check_all_fail(outcomes, ErrorKind::protocol, {"the store showed them different records"});
}

// What the own rank is read back as, and who wrote it had the job's secret.
void test_two_processes_of_one_rank() {
  const auto written_by = [](const std::string& process, const std::string& its_secret) {
    SealedWriter writer({its_secret, "world/rank/1"});
    writer.add("host");
    writer.add(process);
    return writer.take();
  };
  const auto said_of = [&](const std::string& stored) -> std::string {
    const std::string own = written_by("this one", secret);
    SealedReader reader(stored, "rank 1", {secret, "world/rank/1"}, &own);
    reader.text("host");
    try {
      return reader.text("process");
    } catch (const ProtocolError& error) {
      return error.what();
    }
  };
  CHECK(said_of(written_by("this one", secret)) == "this one");
  const auto names_a_process = [](const std::string& text) { return text.find("another process has") != text.npos; };
  CHECK(names_a_process(said_of(written_by("another one", secret))));
  auto fields = fields_of(written_by("this one", secret));
  fields[2] = "another one";
  const std::string text = said_of(bytes_of(fields));
  CHECK(text.find("was changed there: the field 'process'") != text.npos && !names_a_process(text));
}

// A success that the store made of a failure.
void test_a_failure_stays_one() {
  const auto store = make_local_store();
  RewritingStore hostile(store, "world/decision", [](const std::string&) { return encode_success(); });
  const auto outcomes = run_ranks(
      2, {.transport = Transport::tcp, .connect_timeout = 5s},
      [](auto& options) {
        if (options.rank == 1) options.nics = {{"nosuch0", "10.0.0.1"}};
        return true;
      },
      store, [&](int) -> Store& { return hostile; });
  check_all_fail(outcomes, ErrorKind::nic, {"nosuch0"});
}

void test_the_choice_of_nics() {
  NicOffer offer;
  offer.host = "a0";
  offer.place = "place";
  offer.cluster = "a";
  offer.loopback = {"lo", "127.0.0.1"};
  const auto agree = [&](const std::string& key, const RewritingStore::Rewrite& rewrite) {
    const auto store = make_local_store();
    RewritingStore hostile(store, key, rewrite);
    std::vector<std::string> errors(ranks);
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          agree_nics({hostile, "nics", "choosing the NICs", rank, ranks, 5s, secret}, offer, Carrier::tcp);
        } catch (const ProtocolError& error) {
          errors[static_cast<std::size_t>(rank)] = error.what();
        }
      });
    }
    threads.clear();
    return errors;
  };
  const auto same = [](const std::string& bytes) { return bytes; };
  CHECK(agree("nics/1", same) == std::vector<std::string>(ranks));
  for (std::size_t field = 0; field < 17; ++field)
    for (const auto& error : agree("nics/1", change_sealed(field)))
      CHECK(error.find("rank 1 wrote into the store was changed there: the field '") != std::string::npos);
  const std::string changed_answer = "rank 0 wrote into the store was changed there: the field '";
  for (std::size_t field = 0; field < 3; ++field)  // of what all are told: rank 0 does not read it back
    for (const auto& error : agree("nics/answer/0/1", change_sealed(field, "", ranks)) | std::views::drop(1))
      CHECK(error.find(changed_answer) != std::string::npos);
  for (int rank = 1; rank < ranks; ++rank) {  // of what one of them is told
    const auto errors = agree("nics/answer/0/1", change_sealed(0, "", static_cast<std::size_t>(ranks - 1 - rank)));
    for (int other = 0; other < ranks; ++other)
      CHECK((errors[static_cast<std::size_t>(other)].find(changed_answer) != std::string::npos) == (other == rank));
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_tests("test_hostile_store",
                   {{"each_field_of_a_record", test_each_field_of_a_record},
                    {"what_is_passed_on", test_what_is_passed_on},
                    {"the_header_of_a_record", test_the_header_of_a_record},
                    {"tls_is_not_switched_off", test_tls_is_not_switched_off},
                    {"different_records_do_not_connect", test_different_records_do_not_connect},
                    {"two_processes_of_one_rank", test_two_processes_of_one_rank},
                    {"a_failure_stays_one", test_a_failure_stays_one},
                    {"the_choice_of_nics", test_the_choice_of_nics}},
                   argc, argv);
}
