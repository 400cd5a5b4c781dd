// Communicator and Work for Python. Names and argument order follow torch.distributed.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <algorithm>

#include "bindings/bind_buffer.hpp"
#include "bindings/bindings.hpp"
#include "bindings/gil.hpp"
#include "bindings/python_values.hpp"
#include "bindings/quick_method.hpp"
#include "holmes/comm/communicator.hpp"
#include "holmes/core/error.hpp"
#include "holmes/engine/settling.hpp"
#include "holmes/nccl/nccl_communicator.hpp"
#include "holmes/record/communicator_record.hpp"
#include "holmes/reduce/compression.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace holmes {
namespace {

CallOptions call_options(bool async_op, const TimeoutSeconds& timeout_s) {
  CallOptions options;
  options.async = async_op;
  if (timeout_s) options.timeout = to_duration("timeout_s", *timeout_s);
  return options;
}

// For reductions: `premultiply` is NCCL's.
void set_premultiply(CallOptions& options, const Communicator& self, const std::optional<double>& premultiply) {
  if (premultiply && !self.device())
    throw UsageError("premultiply is for communicators of a GPU's memory; multiply the buffer first");
  options.premultiply = premultiply;
}

// Of an asynchronous operation of `self`, which lives as long: its end would be the operation's.
py::object handle_of(const WorkPtr& work, Communicator& self) {
  py::object made = py::cast(work);
  py::detail::keep_alive_impl(made, py::cast(&self, py::return_value_policy::reference));
  return made;
}

// What `start` gives, which runs without the GIL but for what takes a microsecond or two. It is to end its Works where
// that is not asynchronous.
template <typename Start>
auto run_without_gil(const Communicator& self, CallOptions options, const Start& start) {
  GilHold gil;
  if (self.lets_go() && !options.async)
    options.held = &gil;
  else
    gil.let_go();
  return start(std::move(options));
}

// Ended where the call is synchronous; raises then.
template <typename Start>
WorkPtr start(const Communicator& self, bool async_op, const TimeoutSeconds& timeout_s, const Start& start_work) {
  return run_without_gil(self, call_options(async_op, timeout_s), [&](CallOptions options) {
    WorkPtr work = start_work(std::move(options));
    if (!async_op) work->join();
    return work;
  });
}

// A synchronous call gives None, an asynchronous one its Work.
template <typename Start>
py::object run(Communicator& self, bool async_op, const TimeoutSeconds& timeout_s, const Start& start_work) {
  const WorkPtr work = start(self, async_op, timeout_s, start_work);
  return async_op ? handle_of(work, self) : py::object(py::none());
}

std::vector<WorkPtr> start_batch(Communicator& self, std::vector<P2pCall> calls, bool async_op,
                                 const TimeoutSeconds& timeout_s) {
  return run_without_gil(self, call_options(async_op, timeout_s), [&](CallOptions options) {
    std::vector<WorkPtr> works = self.batch(std::move(calls), std::move(options));
    if (!async_op)
      for (const WorkPtr& work : works) work->join();
    return works;
  });
}

bool is_list(const py::handle& object) { return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()); }

// What a caller's list holds, until the call ends: a signal's handler or another thread may change it meanwhile.
py::object kept(const py::object& object) { return PyList_Check(object.ptr()) ? py::tuple(object) : object; }

std::vector<Buffer> list_buffers(const py::handle& list, const BufferUse& use) {
  std::vector<Buffer> buffers;
  for (const py::handle& item : list) buffers.push_back(to_buffer(item, use));
  return buffers;
}

using SplitSizes = std::optional<std::vector<std::int64_t>>;

// Of an array's first dimension; elements of what has no dimensions.
std::size_t rows_of(const py::handle& object, const Buffer& buffer) {
  const py::object shape = py::getattr(object, "shape", py::none());
  if (!py::isinstance<py::tuple>(shape) || py::len(shape) == 0) return buffer.count;
  return shape[py::int_(0)].cast<std::size_t>();
}

// `splits` in rows, one for each rank, of `rows` together.
std::vector<std::size_t> checked_rows(const std::vector<std::int64_t>& splits, int size, std::size_t rows,
                                      const char* what) {
  if (static_cast<int>(splits.size()) != size)
    throw UsageError(std::string(what) + ": " + std::to_string(splits.size()) + " split sizes for " +
                     std::to_string(size) + " ranks; give one for each rank");
  std::int64_t sum = 0;
  for (const std::int64_t n : splits) {
    if (n < 0)
      throw UsageError(std::string(what) + ": split size " + std::to_string(n) + " is negative; use 0 or more");
    if (__builtin_add_overflow(sum, n, &sum))
      throw UsageError(std::string(what) + ": split size " + std::to_string(n) +
                       " makes the sum larger than any buffer; give sizes that add up to its first dimension");
  }
  if (static_cast<std::size_t>(sum) != rows)
    throw UsageError(std::string(what) + ": " + std::to_string(rows) + " rows cannot be cut into " +
                     std::to_string(sum) + " (the sum of the split sizes); give sizes that add up to its first " +
                     "dimension");
  return {splits.begin(), splits.end()};
}

// Cuts `whole`, of `rows`, into one part per rank: equal ones, or as `splits` (in rows) say.
std::vector<Buffer> cut(const Buffer& whole, std::size_t rows, int size, const SplitSizes& splits, const char* what) {
  const auto ranks = static_cast<std::size_t>(size);
  if (!splits && whole.count % ranks != 0)
    throw UsageError(std::string(what) + ": " + std::to_string(whole.count) + " elements cannot be cut into " +
                     std::to_string(size) + " equal parts; pad the buffer or give split sizes that add up to its " +
                     "first dimension");
  std::vector<std::size_t> counts(ranks, whole.count / ranks);
  if (splits) {
    counts = checked_rows(*splits, size, rows, what);
    for (std::size_t& count : counts) count *= rows ? whole.count / rows : 0;
  }
  std::vector<Buffer> parts;
  std::size_t begin = 0;
  for (const std::size_t count : counts) {
    Buffer part = whole;
    part.data = whole.begin() + begin * size_bytes(whole.dtype);
    part.count = count;
    parts.push_back(std::move(part));
    begin += count;
  }
  return parts;
}

// One buffer per rank from a list of arrays or from one array that is cut.
std::vector<Buffer> per_rank(const py::handle& object, int size, const BufferUse& use,
                             const SplitSizes& splits = std::nullopt) {
  if (!is_list(object)) {
    const Buffer whole = to_buffer(object, use);
    return cut(whole, splits ? rows_of(object, whole) : 0, size, splits, use.what);
  }
  if (splits)
    throw UsageError(std::string(use.what) + ": split sizes are for one buffer, and this is a list of them; leave " +
                     "them out, the buffers' own sizes count");
  return list_buffers(object, use);
}

// What one of the calls receives no other one of them reads or writes: they have no order.
void refuse_shared_memory(const char* operation, const std::vector<P2pCall>& calls) {
  struct Piece {
    const std::byte *begin, *end;
    bool is_send;
  };
  std::vector<Piece> pieces;
  pieces.reserve(calls.size());
  for (const P2pCall& call : calls) {
    const std::byte* const begin = call.buffer.begin();
    if (call.buffer.bytes() > 0) pieces.push_back({begin, begin + call.buffer.bytes(), call.is_send});
  }
  std::ranges::sort(pieces, {}, &Piece::begin);
  const std::byte *end = nullptr, *received_end = nullptr;  // of those before
  for (const Piece& piece : pieces) {
    if (piece.begin < (piece.is_send ? received_end : end))
      throw UsageError(std::string(operation) +
                       ": a tensor that is received into shares memory with another one of the same call, and its "
                       "messages have no order; give each receive memory of its own, or make two calls");
    end = std::max(end, piece.end);
    if (!piece.is_send) received_end = std::max(received_end, piece.end);
  }
}

// Kind, tensor, peer, tag.
using MessageTuple = std::tuple<std::string, py::object, int, std::int64_t>;

// Of a message; the largest is the library's own.
std::uint32_t checked_tag(std::int64_t tag) {
  if (tag >= 0 && tag < static_cast<std::int64_t>(internal_tag)) return static_cast<std::uint32_t>(tag);
  throw UsageError("tag " + std::to_string(tag) + " is not possible; use 0 to " + std::to_string(internal_tag - 1));
}

std::shared_ptr<Communicator> make(const py::object& store, CommunicatorOptions options) {
  std::shared_ptr<Store> native = to_store(store);
  const GilRelease no_gil;
  return make_communicator(std::move(native), std::move(options));
}

constexpr const char* common_doc =
    "\n\nAll buffers are contiguous host memory: torch CPU tensors, numpy arrays, anything with DLPack or the buffer\n"
    "protocol. `op` is one of 'sum', 'avg', 'min', 'max', 'product', 'band', 'bor', 'bxor'. With async_op=True returns "
    "a Work\n"
    "at once, else blocks and returns None. `timeout_s`: deadline in seconds, None: the communicator's. Raises "
    "UsageError for\n"
    "bad arguments (the communicator stays usable); MismatchError, PeerLostError, TimeoutError, AbortedError kill it, "
    "and so\n"
    "does what a signal's handler raises meanwhile (KeyboardInterrupt).";

std::string doc(const char* text) { return std::string(text) + common_doc; }

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<Communicator, std::shared_ptr<Communicator>> type(
      module, "Communicator",
      "A group of ranks bound to their NICs. All ranks call the same collectives in the same order; sends and receives "
      "match\n"
      "per pair and tag. Thread-safe. Make one with holmes_comm.init.");
  stays_in_its_process(type, "call holmes_comm.init in each process");
  type.def_property_readonly("rank", &Communicator::rank, "This process's rank in the communicator.")
      .def_property_readonly("size", &Communicator::size, "Number of ranks.")
      .def_property_readonly("name", &Communicator::name, "Name in errors and logs; the same on all ranks.")
      .def_property_readonly("device", &Communicator::device,
                             "Number of the GPU whose memory it moves; None: host memory.")
      .def_property_readonly("is_dead", &Communicator::is_dead, "Whether an error, abort or close ended it.")
      .def("__repr__", [](const Communicator& self) {
        return "<Communicator '" + self.name() + "', rank " + std::to_string(self.rank()) + " of " +
               std::to_string(self.size()) + (self.is_dead() ? ", ended>" : ">");
      });
  def_quick(
      type, "all_reduce",
      [](Communicator& self, const py::object& tensor, const std::string& op, bool async_op,
         const TimeoutSeconds& timeout_s, const std::optional<std::shared_ptr<Compression>>& compression,
         const std::optional<double>& premultiply) {
        Buffer data = to_buffer(tensor, {"all_reduce: tensor", true, async_op, self.device()});
        const ReduceOp reduction = reduce_op_from_name(op);
        return run(self, async_op, timeout_s, [&](CallOptions options) {
          set_premultiply(options, self, premultiply);
          options.compression = compression.value_or(nullptr);
          return self.all_reduce(std::move(data), reduction, std::move(options));
        });
      },
      "tensor"_a, "op"_a = "sum", "async_op"_a = false, "timeout_s"_a = py::none(), "compression"_a = py::none(),
      "premultiply"_a = py::none(),
      doc("Collective, in place: `tensor` (any shape, count and dtype equal on all ranks) becomes the reduction "
          "over all\n"
          "ranks, bit-identical on all of them. `compression`: a Compression of the hop between clusters, for "
          "sums and averages\n"
          "of float32 on a communicator that spans clusters; None: not compressed. `premultiply`: device memory "
          "and sums of\n"
          "floating point only: every rank's contribution is multiplied by this number first.")
          .c_str());
  def_quick(
      type, "reduce_scatter",
      [](Communicator& self, const py::object& output, const py::object& input, const std::string& op, bool async_op,
         const TimeoutSeconds& timeout_s, const std::optional<std::shared_ptr<Compression>>& compression,
         const std::optional<double>& premultiply) {
        Buffer out = to_buffer(output, {"reduce_scatter: output", true, async_op, self.device()});
        const py::object inputs = kept(input);
        std::vector<Buffer> in =
            per_rank(inputs, self.size(), {"reduce_scatter: input", false, async_op, self.device()});
        const ReduceOp reduction = reduce_op_from_name(op);
        return run(self, async_op, timeout_s, [&](CallOptions options) {
          set_premultiply(options, self, premultiply);
          options.compression = compression.value_or(nullptr);
          return self.reduce_scatter(std::move(out), std::move(in), reduction, std::move(options));
        });
      },
      "output"_a, "input"_a, "op"_a = "sum", "async_op"_a = false, "timeout_s"_a = py::none(),
      "compression"_a = py::none(), "premultiply"_a = py::none(),
      doc("Collective: `input` is one buffer, cut into `size` equal parts, or a list of `size` buffers (which may "
          "differ in\n"
          "count); part r, reduced over all ranks, lands in `output` of rank r. `output` may be this rank's part "
          "of\n"
          "`input`, else they must not overlap. `compression`: as in all_reduce, where all parts have one count and "
          "the "
          "clusters\n"
          "as many ranks each; else not compressed. `premultiply`: as in all_reduce.")
          .c_str());
  def_quick(
      type, "all_gather",
      [](Communicator& self, const py::object& output, const py::object& input, bool async_op,
         const TimeoutSeconds& timeout_s, const std::optional<std::shared_ptr<Compression>>& compression) {
        const py::object outputs = kept(output);
        std::vector<Buffer> out = per_rank(outputs, self.size(), {"all_gather: output", true, async_op, self.device()});
        Buffer in = to_buffer(input, {"all_gather: input", false, async_op, self.device()});
        return run(self, async_op, timeout_s, [&](CallOptions options) {
          options.compression = compression.value_or(nullptr);
          return self.all_gather(std::move(out), std::move(in), std::move(options));
        });
      },
      "output"_a, "input"_a, "async_op"_a = false, "timeout_s"_a = py::none(), "compression"_a = py::none(),
      doc("Collective: `output` is one buffer of `size` equal parts, or a list of `size` buffers (which may differ "
          "in count:\n"
          "the uneven form); part r becomes rank r's `input`. `input` may be this rank's part of `output`. "
          "`compression`: as in\n"
          "reduce_scatter; all ranks have the same bits, this rank's part included.")
          .c_str());
  def_quick(
      type, "broadcast",
      [](Communicator& self, const py::object& tensor, int src, bool async_op, const TimeoutSeconds& timeout_s) {
        Buffer data = to_buffer(tensor, {"broadcast: tensor", src != self.rank(), async_op, self.device()});
        return run(self, async_op, timeout_s,
                   [&](CallOptions options) { return self.broadcast(std::move(data), src, std::move(options)); });
      },
      "tensor"_a, "src"_a = 0, "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Collective, in place: `tensor` of every rank becomes that of rank `src`.").c_str());
  def_quick(
      type, "reduce",
      [](Communicator& self, const py::object& tensor, int dst, const std::string& op, bool async_op,
         const TimeoutSeconds& timeout_s) {
        Buffer data = to_buffer(tensor, {"reduce: tensor", dst == self.rank(), async_op, self.device()});
        const ReduceOp reduction = reduce_op_from_name(op);
        return run(self, async_op, timeout_s, [&](CallOptions options) {
          return self.reduce(std::move(data), dst, reduction, std::move(options));
        });
      },
      "tensor"_a, "dst"_a = 0, "op"_a = "sum", "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Collective, in place on rank `dst`, whose `tensor` becomes the reduction; the others' is unchanged.")
          .c_str());
  def_quick(
      type, "gather",
      [](Communicator& self, const py::object& tensor, const py::object& gather_list, int dst, bool async_op,
         const TimeoutSeconds& timeout_s) {
        Buffer in = to_buffer(tensor, {"gather: tensor", false, async_op, self.device()});
        const py::object outputs = kept(gather_list);
        std::vector<Buffer> out;
        if (dst == self.rank()) {
          if (gather_list.is_none())
            throw UsageError("gather: rank " + std::to_string(dst) + " is the root, gather_list must be given");
          out = per_rank(outputs, self.size(), {"gather: gather_list", true, async_op, self.device()});
        }
        return run(self, async_op, timeout_s, [&](CallOptions options) {
          return self.gather(std::move(out), std::move(in), dst, std::move(options));
        });
      },
      "tensor"_a, "gather_list"_a = py::none(), "dst"_a = 0, "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Collective: `gather_list` of rank `dst` (list, or one buffer of equal parts) gets every rank's "
          "`tensor`; counts\n"
          "may differ.")
          .c_str());
  def_quick(
      type, "scatter",
      [](Communicator& self, const py::object& tensor, const py::object& scatter_list, int src, bool async_op,
         const TimeoutSeconds& timeout_s) {
        Buffer out = to_buffer(tensor, {"scatter: tensor", true, async_op, self.device()});
        const py::object inputs = kept(scatter_list);
        std::vector<Buffer> in;
        if (src == self.rank()) {
          if (scatter_list.is_none())
            throw UsageError("scatter: rank " + std::to_string(src) + " is the root, scatter_list must be given");
          in = per_rank(inputs, self.size(), {"scatter: scatter_list", false, async_op, self.device()});
        }
        return run(self, async_op, timeout_s, [&](CallOptions options) {
          return self.scatter(std::move(out), std::move(in), src, std::move(options));
        });
      },
      "tensor"_a, "scatter_list"_a = py::none(), "src"_a = 0, "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Collective: `tensor` of rank r becomes part r of `scatter_list` of rank `src`; counts may differ.").c_str());
  def_quick(
      type, "all_to_all",
      [](Communicator& self, const py::object& output, const py::object& input, const SplitSizes& output_split_sizes,
         const SplitSizes& input_split_sizes, bool async_op, const TimeoutSeconds& timeout_s) {
        auto* const nccl = dynamic_cast<NcclCommunicator*>(&self);
        if (nccl != nullptr && !is_list(output) && !is_list(input) && !output_split_sizes && !input_split_sizes) {
          Buffer out = to_buffer(output, {"all_to_all: output", true, async_op, self.device()});
          Buffer in = to_buffer(input, {"all_to_all: input", false, async_op, self.device()});
          return run(self, async_op, timeout_s, [&](CallOptions options) {
            return nccl->all_to_all_equal(std::move(out), std::move(in), std::move(options));
          });
        }
        const py::object outputs = kept(output), inputs = kept(input);
        std::vector<Buffer> out =
            per_rank(outputs, self.size(), {"all_to_all: output", true, async_op, self.device()}, output_split_sizes);
        std::vector<Buffer> in =
            per_rank(inputs, self.size(), {"all_to_all: input", false, async_op, self.device()}, input_split_sizes);
        return run(self, async_op, timeout_s, [&](CallOptions options) {
          return self.all_to_all(std::move(out), std::move(in), std::move(options));
        });
      },
      "output"_a, "input"_a, "output_split_sizes"_a = py::none(), "input_split_sizes"_a = py::none(),
      "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Collective: part r of `output` becomes this rank's part of rank r's `input`. Both are lists of `size` "
          "buffers, or\n"
          "one buffer cut into equal parts or by split sizes (rows of the first dimension, one per rank).")
          .c_str());
  def_quick(
      type, "barrier",
      [](Communicator& self, bool async_op, const TimeoutSeconds& timeout_s) {
        return run(self, async_op, timeout_s, [&](CallOptions options) { return self.barrier(std::move(options)); });
      },
      "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Collective: returns when every rank has entered it.").c_str());
  def_quick(
      type, "send",
      [](Communicator& self, const py::object& tensor, int dst, std::int64_t tag, bool async_op,
         const TimeoutSeconds& timeout_s) {
        Buffer data = to_buffer(tensor, {"send: tensor", false, async_op, self.device(), true});
        const std::uint32_t wire_tag = checked_tag(tag);
        return run(self, async_op, timeout_s,
                   [&](CallOptions options) { return self.send(std::move(data), dst, wire_tag, std::move(options)); });
      },
      "tensor"_a, "dst"_a, "tag"_a = 0, "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Sends `tensor` to rank `dst`. Complete when the buffer may be reused. Local, but the receiver must take "
          "it. A GPU's\n"
          "memory is allowed too (torch CUDA tensors, cupy, ...), on either end (docs/gpu.md).")
          .c_str());
  def_quick(
      type, "recv",
      [](Communicator& self, const py::object& tensor, const std::optional<int>& src, std::int64_t tag, bool async_op,
         const TimeoutSeconds& timeout_s) -> py::object {
        Buffer data = to_buffer(tensor, {"recv: tensor", true, async_op, self.device(), true});
        const std::uint32_t wire_tag = checked_tag(tag);
        const WorkPtr work = start(self, async_op, timeout_s, [&](CallOptions options) {
          return src ? self.recv(std::move(data), *src, wire_tag, std::move(options))
                     : self.recv_any(std::move(data), wire_tag, std::move(options));
        });
        return async_op ? handle_of(work, self) : py::cast(work->source_rank());
      },
      "tensor"_a, "src"_a = py::none(), "tag"_a = 0, "async_op"_a = false, "timeout_s"_a = py::none(),
      doc("Receives into `tensor` from rank `src` (None: whoever sends with this tag first). Returns the source "
          "rank where\n"
          "async_op is False; Work.source_rank tells it else. Count and dtype must be the sender's. A GPU's memory "
          "as "
          "in send.")
          .c_str());
  def_quick(
      type, "sendrecv",
      [](Communicator& self, const py::object& send_tensor, int dst, const py::object& recv_tensor, int src,
         std::int64_t tag, const TimeoutSeconds& timeout_s) {
        const std::uint32_t wire_tag = checked_tag(tag);
        std::vector<P2pCall> p2p;
        p2p.reserve(2);
        p2p.push_back({false, to_buffer(recv_tensor, {"sendrecv: recv_tensor", true, false, self.device(), true}), src,
                       wire_tag});
        p2p.push_back({true, to_buffer(send_tensor, {"sendrecv: send_tensor", false, false, self.device(), true}), dst,
                       wire_tag});
        refuse_shared_memory("sendrecv", p2p);
        start_batch(self, std::move(p2p), false, timeout_s);
      },
      "send_tensor"_a, "dst"_a, "recv_tensor"_a, "src"_a, "tag"_a = 0, "timeout_s"_a = py::none(),
      "Sends `send_tensor` to rank `dst` and receives `recv_tensor` from rank `src` at the same time (MPI's "
      "Sendrecv); returns when\nboth are done. Both may be the same rank; a ring of ranks that all call it does "
      "not deadlock. Matches send, recv and batch of\nits peers. Count and dtype of a message must be its "
      "sender's. Raises as send and recv, and UsageError where the two share memory.");
  def_quick(
      type, "batch",
      [](Communicator& self, const std::vector<MessageTuple>& calls, const TimeoutSeconds& timeout_s, bool async_op) {
        std::vector<P2pCall> p2p;
        p2p.reserve(calls.size());
        for (const auto& [kind, tensor, peer, tag] : calls) {
          if (kind != "send" && kind != "recv")
            throw UsageError("batch: '" + kind + "' is not a call; use 'send' or 'recv'");
          p2p.push_back({kind == "send",
                         to_buffer(tensor, {"batch: tensor", kind == "recv", async_op, self.device(), true}), peer,
                         checked_tag(tag)});
        }
        refuse_shared_memory("batch", p2p);
        std::vector<WorkPtr> works = start_batch(self, std::move(p2p), async_op, timeout_s);
        if (!async_op) works.clear();
        py::typing::List<WorkPtr> handles;
        for (const WorkPtr& work : works) handles.append(handle_of(work, self));
        return handles;
      },
      "calls"_a, "timeout_s"_a = py::none(), "async_op"_a = true,
      "Starts sends and receives at once: `calls` is a list of ('send' or 'recv', tensor, peer, tag). Returns a "
      "Work for each;\nwith async_op=False an empty list once all are done.\n"
      "No order between them, so a ring of ranks that all send first does not deadlock. Raises UsageError where "
      "what "
      "one\ncall receives shares memory with another one's.");
  const auto split = [](Communicator& self, int color, int key) {
    std::shared_ptr<Communicator> made;
    {
      const GilRelease no_gil;
      made = self.split(color, key);
    }
    return py::typing::Union<Communicator>(py::cast(made));  // as stubs show it
  };
  def_quick(type, "split", split, "color"_a, "key"_a = 0,
            "Collective: ranks of equal `color` (0 or more) form a new communicator on the same NICs, ordered by (key, "
            "rank). Color -1\n"
            "takes no part and gets None.");
  type.def("abort", &Communicator::abort, "reason"_a = "abort was called", py::call_guard<GilRelease>(),
           "Local, from any thread, does not block: every pending and later operation raises AbortedError here and on "
           "the peers.")
      .def(
          "connections",
          [](const Communicator& self) {
            py::list list;
            for (const ConnectionInfo& info : self.connections()) list.append(to_dict(info));
            return list;
          },
          "Every established connection as a dict: peer, host, transport, purpose, interface, local_address, "
          "remote_address,\n"
          "device_bound, retired, path (\"inter\": to a rank of another cluster, or a far one where no clusters are "
          "named;\n"
          "else \"intra\"), sent_bytes, received_bytes, retransmitted_segments, resent_chunks, round_trip_us, busy_us "
          "(how\n"
          "long bytes waited to be sent or acknowledged), receiver_limited_us and buffer_limited_us (of that, while "
          "the\n"
          "peer did not read, while the send buffer was full), stalls (inter: how often bytes were under way and none "
          "arrived "
          "for\n"
          "0.3 s, or three round trips if that is longer), stalled_us (in all),\n"
          "path_bytes_per_s (what a far path carries, all that share it together, while more is to be sent than it\n"
          "takes; 0: not known), path_changes (how often that became another rate), encryption ('' where there is "
          "none). Local.")
      .def(
          "flight_record",
          [](const Communicator& self) {
            JsonWriter json;
            {
              const GilRelease no_gil;
              json.begin_array();
              for (const CommunicatorRecord& record : self.flight_record()) append_json(json, record);
              json.end_array();
            }
            return py::module_::import("holmes_comm.recorder").attr("operations")(json.text());
          },
          "The last operations (HOLMES_FLIGHT_RECORDER, default 256), oldest first, as dicts: communicator, op, "
          "sequence, tag,\n"
          "dtype, count, bytes, reduction, root, peer, nics, state, queued_s, started_s, finished_s (of the monotonic "
          "clock),\n"
          "queued_wall_s, and waiting_for: with whom bytes are missing, and how many. Local (docs/debug.md).");
  module.def("make_communicator", &make, "store"_a, "options"_a,
             "Collective over the ranks that share `store`: connects them over the NICs of `options`. holmes_comm.init "
             "chooses\nthe NICs and calls this.");
  module.def("wait_until_settled", &wait_until_settled, py::call_guard<GilRelease>(),
             "Local: returns when no destroyed communicator of this process stays for others any more "
             "(local_completion). The end\nof a process does it, but for os._exit.");
}

}  // namespace holmes

void bind_comm(py::module_& module) { holmes::bind_communicator(module); }
