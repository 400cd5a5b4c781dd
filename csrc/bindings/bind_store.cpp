#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <variant>

#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/python_values.hpp"
#include "holmes/bootstrap/attempt_store.hpp"
#include "holmes/bootstrap/store_exchange.hpp"
#include "holmes/bootstrap/tcp_store.hpp"
#include "holmes/core/error.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

// What a store keeps.
struct Value {
  std::string bytes;
};

}  // namespace
}  // namespace holmes

namespace pybind11::detail {

template <>
struct type_caster<holmes::Value> {
  PYBIND11_TYPE_CASTER(holmes::Value, const_name("str | bytes"));
  bool load(handle source, bool convert) {
    make_caster<std::string> text;
    if (!text.load(source, convert)) return false;
    value.bytes = cast_op<std::string&&>(std::move(text));
    return true;
  }
};

}  // namespace pybind11::detail

namespace holmes {
namespace {

// Throw UsageError naming `what` where the value is of another type; without the value, which may be a secret.
std::string text_of(const char* what, const py::object& value) {
  if (!py::isinstance<py::str>(value))
    throw UsageError(std::string(what) + " is of type " + Py_TYPE(value.ptr())->tp_name + "; give text");
  return value.cast<std::string>();
}

double number_of(const char* what, const py::object& value) {
  if (!py::isinstance<py::int_>(value) && !py::isinstance<py::float_>(value))
    throw UsageError(std::string(what) + " is of type " + Py_TYPE(value.ptr())->tp_name + "; give a number");
  return value.cast<double>();
}

std::uint16_t port_of(const py::object& value) {
  const std::string rule = "; it must be a whole number from 0 (any) to 65535";
  if (!py::isinstance<py::int_>(value))
    throw UsageError(std::string("port is of type ") + Py_TYPE(value.ptr())->tp_name + rule);
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow != 0 || number < 0 || number > 65535)
    throw UsageError("port is " + py::str(value).cast<std::string>() + rule);
  return static_cast<std::uint16_t>(number);
}

// Holds the GIL only inside its methods. What the object raises passes through, but for "not there in time".
class PyStore final : public Store {
public:
  explicit PyStore(py::object store) : store_(std::move(store)), has_check_(py::hasattr(store_, "check")) {}
  ~PyStore() override {
    if (Py_IsInitialized() == 0) {
      store_.release();  // the interpreter is gone, and the object with it
      return;
    }
    const GilAcquire gil;
    store_ = py::object();
  }

  void set(const std::string& key, const std::string& value) override {
    const GilAcquire gil;
    raise_signals();
    store_.attr("set")(key, py::bytes(value));
  }

  std::string get(const std::string& key, Duration timeout) override {
    wait(key, timeout);
    const GilAcquire gil;
    return store_.attr("get")(key).cast<std::string>();
  }

  void wait(const std::string& key, Duration timeout) override {
    const auto deadline = Clock::now() + timeout;
    for (auto pause = first_pause; has_check_; pause = std::min(2 * pause, longest_pause)) {
      if (check(key)) return;
      if (!has_check_) break;
      const auto left = deadline - Clock::now();
      if (left <= Duration::zero()) throw store_timeout(key, timeout);
      std::this_thread::sleep_for(std::min<Duration>(pause, left));
    }
    wait_inside(key, timeout);
  }

  std::size_t remove(std::span<const std::string> keys) override {
    const GilAcquire gil;
    raise_signals();
    if (!py::hasattr(store_, "delete_key")) return 0;
    std::size_t removed = 0;
    try {
      for (const std::string& key : keys) removed += store_.attr("delete_key")(key).equal(py::bool_(true));
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // else it cannot
    }
    return removed;
  }

  std::shared_ptr<Store> another_client() override {
    const GilAcquire gil;
    if (!py::hasattr(store_, "clone")) return nullptr;
    try {
      return std::make_shared<PyStore>(store_.attr("clone")());
    } catch (const py::error_already_set&) {  // it cannot
      return nullptr;
    }
  }

private:
  static constexpr auto first_pause = std::chrono::milliseconds(1);
  static constexpr auto longest_pause = std::chrono::milliseconds(50);

  // So that Ctrl-C ends a set-up.
  static void raise_signals() {
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

  // Asking now and then is better than torch's wait: that one keeps other threads off the store, and complains on
  // stderr of every wait that ends without the key.
  bool check(const std::string& key) {
    const GilAcquire gil;
    raise_signals();
    try {
      return store_.attr("check")(std::vector<std::string>{key}).cast<bool>();
    } catch (const py::cast_error&) {
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
    }
    has_check_ = false;  // some stores lack it
    return false;
  }

  void wait_inside(const std::string& key, Duration timeout) {
    const GilAcquire gil;
    raise_signals();
    // A c10d store counts milliseconds and takes 0 for "for ever".
    const auto limit = std::max(std::chrono::ceil<std::chrono::milliseconds>(timeout), std::chrono::milliseconds(1));
    const auto started = Clock::now();
    const auto keys = std::vector<std::string>{key};
    try {
      if (takes_timeout_) {
        try {
          store_.attr("wait")(keys, limit);
          return;
        } catch (py::error_already_set& error) {
          if (!error.matches(PyExc_TypeError)) throw;
          takes_timeout_ = false;
        }
      }
      store_.attr("wait")(keys);  // has a timeout of its own
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt, SystemExit
      // Stores disagree on the class: the clock or the text tells.
      const auto text = py::str(error.value()).attr("lower")().cast<std::string>();
      const bool is_timeout = Clock::now() - started >= limit || error.matches(PyExc_TimeoutError) ||
                              text.find("timeout") != std::string::npos || text.find("timed out") != std::string::npos;
      if (!is_timeout) throw;
      throw store_timeout(key, timeout);
    }
  }

  py::object store_;
  std::atomic<bool> has_check_;
  std::atomic<bool> takes_timeout_{true};
};

Duration seconds(double value) {
  constexpr double longest_s = 1e8;  // three years; a Duration overflows at 292
  if (!(value >= 0)) {
    throw UsageError("timeout " + std::to_string(value) + " s is not possible: give a number of seconds, 0 or more");
  }
  value = std::min(value, longest_s);
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(value));
}

constexpr double default_timeout_s = 300.0;

// The wait of torch.distributed: a list of keys and a timedelta; also one key and seconds.
void wait_keys(Store& store, const std::variant<std::string, std::vector<std::string>>& keys,
               const std::variant<std::chrono::microseconds, double>& timeout) {
  const Duration limit =
      std::holds_alternative<double>(timeout)
          ? seconds(std::get<double>(timeout))
          : seconds(std::chrono::duration<double>(std::get<std::chrono::microseconds>(timeout)).count());
  const GilRelease no_gil;
  const auto end = Clock::now() + limit;
  const auto wait_one = [&](const std::string& key) {
    store.wait(key, std::max(end - Clock::now(), Duration::zero()));
  };
  if (const auto* key = std::get_if<std::string>(&keys)) return wait_one(*key);
  for (const std::string& key : std::get<std::vector<std::string>>(keys)) wait_one(key);
}

}  // namespace

std::shared_ptr<Store> to_store(const py::object& object) {
  if (py::isinstance<Store>(object)) return object.cast<std::shared_ptr<Store>>();
  for (const char* method : {"set", "get", "wait"})
    if (!py::hasattr(object, method))
      throw UsageError("a store needs the methods set, get and wait; " +
                       std::string(py::str(py::type::handle_of(object).attr("__name__"))) + " has no " + method);
  return std::make_shared<PyStore>(object);
}

namespace {

void define_store(py::module_& module) {
  py::class_<Store, std::shared_ptr<Store>> store(module, "Store",
                                                  "A key-value rendezvous: set, get, wait. Thread-safe.");
  stays_in_its_process(store, "make one in each process: a TcpStore, as client where this one serves");
  store
      .def(
          "set",
          [](Store& store, const std::string& key, const Value& value) {
            const GilRelease no_gil;
            store.set(key, value.bytes);
          },
          "key"_a, "value"_a, "Sets `key` to bytes or text; overwrites.")
      .def(
          "get",
          [](Store& store, const std::string& key, double timeout_s) {
            std::string value;
            {
              const GilRelease no_gil;
              value = store.get(key, seconds(timeout_s));
            }
            return py::bytes(value);
          },
          "key"_a, "timeout_s"_a = default_timeout_s,
          "The bytes of `key`, waiting until somebody sets it. Raises TimeoutError naming the key after `timeout_s` "
          "seconds.")
      .def("wait", &wait_keys, "keys"_a, "timeout"_a = default_timeout_s,
           "Waits until `keys` (one or a list) exist. `timeout`: seconds or a timedelta. Raises TimeoutError naming "
           "the key.");
  py::class_<AtomicStore, Store, std::shared_ptr<AtomicStore>>(
      module, "AtomicStore",
      "A store with what agreements need besides, as torch's c10d stores have it. Each call takes effect at once, one\n"
      "after the other, for all who use the store.")
      .def(
          "add",
          [](AtomicStore& store, const std::string& key, std::int64_t amount) {
            const GilRelease no_gil;
            return store.add(key, amount);
          },
          "key"_a, "amount"_a,
          "Adds to the whole number that `key` holds (0 where nobody has set it); returns the sum. Raises UsageError "
          "where it holds none, or the sum has more than 64 bits.")
      .def(
          "compare_set",
          [](AtomicStore& store, const std::string& key, const Value& expected, const Value& desired) {
            std::string value;
            {
              const GilRelease no_gil;
              value = store.compare_set(key, expected.bytes, desired.bytes);
            }
            return py::bytes(value);
          },
          "key"_a, "expected"_a, "desired"_a,
          "Sets `key` to `desired` where it holds `expected`, or where nobody has set it and `expected` is empty. "
          "Returns the bytes that it holds then; `expected` where nobody has set it.")
      .def(
          "check",
          [](AtomicStore& store, const std::vector<std::string>& keys) {
            const GilRelease no_gil;
            return store.check(keys);
          },
          "keys"_a, "Whether all of `keys` are set.")
      .def(
          "multi_get",
          [](AtomicStore& store, const std::vector<std::string>& keys, double timeout_s) {
            std::vector<std::string> values;
            {
              const GilRelease no_gil;
              values = store.multi_get(keys, seconds(timeout_s));
            }
            return std::vector<py::bytes>(values.begin(), values.end());
          },
          "keys"_a, "timeout_s"_a = default_timeout_s,
          "The bytes of all `keys`, waiting until all are set. Raises TimeoutError naming one that is not after "
          "`timeout_s` seconds.")
      .def(
          "delete_key",
          [](AtomicStore& store, const std::string& key) {
            const GilRelease no_gil;
            return store.remove(std::span(&key, 1)) > 0;
          },
          "key"_a, "Removes `key`; returns whether it was set.")
      .def(
          "num_keys",
          [](AtomicStore& store) {
            const GilRelease no_gil;
            return store.num_keys();
          },
          "How many keys are set.")
      // Of a LocalStore, which has no class of its own.
      .def("__repr__", [](const AtomicStore&) { return "<LocalStore>"; });
  module.def(
      "meet",
      [](const py::object& store, int rank, int size, const std::string& key, const py::bytes& value,
         const std::function<py::bytes(std::vector<py::bytes>)>& conclude, const std::string& what, double timeout_s) {
        const auto native = to_store(store);
        const std::string own = value;
        const Meeting meeting{*native, key, what, rank, size, to_duration("timeout_s", timeout_s)};
        const auto sealed = [](const std::string& bytes, const Seal& seal) {
          SealedWriter writer(seal);
          writer.add(bytes);
          return writer.take();
        };
        const auto opened = [](const Sealed& value, int writer) {
          return SealedReader(value.bytes, "rank " + std::to_string(writer), value.seal).text("value");
        };
        const auto conclusion = [&](const std::vector<Sealed>& values, const Seal& seal) -> Conclusion {
          const GilAcquire gil;
          std::vector<py::bytes> given;
          for (const auto& value : values) given.emplace_back(opened(value, static_cast<int>(given.size())));
          return {sealed(conclude(std::move(given)), seal)};
        };
        std::string answer;
        {
          const GilRelease no_gil;
          answer = opened(meet(meeting, [&](const Seal& seal) { return sealed(own, seal); }, conclusion).for_all, 0);
        }
        return py::bytes(answer);
      },
      "store"_a, "rank"_a, "size"_a, "key"_a, "value"_a, "conclude"_a, "what"_a, "timeout_s"_a,
      "Everybody's `value` to rank 0, which calls `conclude` with all of them, by rank; its answer to everybody. "
      "Bytes. Collective. `key`: a fresh one; `what`: for messages ('choosing the NICs'). Raises TimeoutError on every "
      "rank, "
      "naming those that did not come.");
  module.def("LocalStore", &make_local_store, "A store in memory, for ranks that are threads of one process.");
  py::class_<PrefixStore, Store, std::shared_ptr<PrefixStore>>(module, "PrefixStore",
                                                               "A view of a store in which every key has a prefix.")
      .def(py::init([](const std::string& prefix, const py::object& store) {
             return std::make_shared<PrefixStore>(prefix, to_store(store));
           }),
           "prefix"_a, "store"_a);
  py::class_<AttemptStore, Store, std::shared_ptr<AttemptStore>>(
      module, "AttemptStore",
      "A view of a store for one try of setting up the communicator `name` on `rank`, apart from what earlier tries\n"
      "under that name left there. Others than rank 0 wait up to `timeout_s` seconds until that begins one.")
      .def(py::init([](const py::object& store, std::string name, int rank, double timeout_s) {
             return std::make_shared<AttemptStore>(to_store(store), std::move(name), rank,
                                                   to_duration("timeout_s", timeout_s));
           }),
           "store"_a, "name"_a, "rank"_a, "timeout_s"_a);
  py::class_<TcpStore, AtomicStore, std::shared_ptr<TcpStore>>(
      module, "TcpStore",
      "A store over TCP, for jobs without torch. One process serves (is_server=True; port 0: the kernel chooses), the "
      "others\n"
      "connect, waiting up to `timeout_s` seconds for it. `secret`: the job's; empty: HOLMES_SECRET or "
      "HOLMES_SECRET_FILE,\n"
      "else none: then who reaches the port can read and write. A request that is not answered within "
      "`reply_timeout_s`\n"
      "beyond what it waits raises UnreachableError.")
      // All of any type: pybind11 answers a wrong one with all arguments, the secret too.
      .def(py::init([](const py::object& host, const py::object& port, bool is_server, const py::object& timeout_s,
                       const py::object& secret, const py::object& reply_timeout_s) {
             const std::string host_text = text_of("host", host), secret_text = text_of("secret", secret);
             const std::uint16_t number = port_of(port);
             const Duration timeout = seconds(number_of("timeout_s", timeout_s));
             const Duration reply_timeout = seconds(number_of("reply_timeout_s", reply_timeout_s));
             const GilRelease no_gil;
             return std::make_shared<TcpStore>(host_text, number, is_server, timeout, secret_text, reply_timeout);
           }),
           "host"_a, "port"_a, "is_server"_a = false, "timeout_s"_a = 60.0, "secret"_a = "", "reply_timeout_s"_a = 20.0)
      .def_property_readonly("host", &TcpStore::host, "Host it listens on or connects to.")
      .def_property_readonly("port", &TcpStore::port, "Port it listens on or connects to.")
      .def("__repr__", [](const TcpStore& store) {
        const std::string served = store.is_server() ? ", served here>" : ">";
        return "<TcpStore at " + store.host() + ":" + std::to_string(store.port()) + served;
      });
}

}  // namespace
}  // namespace holmes

void bind_store(py::module_& module) { holmes::define_store(module); }
