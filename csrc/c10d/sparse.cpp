#include "sparse.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <vector>

#include "holmes/core/error.hpp"
#include "tensor_buffer.hpp"

namespace holmes::torch_backend {

// What a rank tells the others of its tensor. The same number of words whatever the tensor.
struct SparseDescription {
  static constexpr std::size_t max_dims = 64;  // torch's own limit
  std::int64_t elements = 0;
  std::int64_t dtype = 0;
  std::int64_t reduction = 0;
  std::int64_t sparse_dims = 0;
  std::int64_t dims = 0;
  std::array<std::int64_t, max_dims> sizes{};

  bool agrees(const SparseDescription& other) const {
    return dtype == other.dtype && reduction == other.reduction && sparse_dims == other.sparse_dims &&
           dims == other.dims && sizes == other.sizes;
  }
  std::string text() const {
    const auto n = std::min(static_cast<std::size_t>(std::max<std::int64_t>(dims, 0)), max_dims);
    return c10::str(static_cast<at::ScalarType>(dtype), " ", c10::IntArrayRef(sizes.data(), n), " (", sparse_dims,
                    " sparse dimensions, ", name(static_cast<ReduceOp>(reduction)), ")");
  }
};

namespace {

constexpr std::size_t description_words = sizeof(SparseDescription) / sizeof(std::int64_t);
static_assert(sizeof(SparseDescription) == (5 + SparseDescription::max_dims) * sizeof(std::int64_t));

// One int64 buffer per rank, in `all`.
std::vector<Buffer> buffers_of(std::vector<SparseDescription>& all) {
  std::vector<Buffer> buffers;
  for (SparseDescription& one : all) buffers.push_back({&one, description_words, DType::int64, nullptr});
  return buffers;
}

SparseDescription describe(const at::Tensor& tensor, ReduceOp op) {
  if (tensor.dim() > static_cast<std::int64_t>(SparseDescription::max_dims))
    throw UsageError("a sparse tensor of " + std::to_string(tensor.dim()) + " dimensions cannot be reduced; use 64");
  SparseDescription own;
  own.elements = tensor._nnz();
  own.dtype = static_cast<std::int64_t>(tensor.scalar_type());
  own.reduction = static_cast<std::int64_t>(op);
  own.sparse_dims = tensor.sparse_dim();
  own.dims = tensor.dim();
  std::ranges::copy(tensor.sizes(), own.sizes.begin());
  return own;
}

void check_reducible(const at::Tensor& tensor, ReduceOp op) {
  if (op != ReduceOp::sum && op != ReduceOp::avg)
    throw UsageError("all_reduce of a sparse tensor with '" + std::string(name(op)) +
                     "' is not supported; use ReduceOp.SUM or AVG, or to_dense() first");
  if (op == ReduceOp::avg && !tensor.is_floating_point())
    throw UsageError("'avg' is not defined for " + std::string(c10::toString(tensor.scalar_type())) +
                     "; use ReduceOp.SUM");
  if (!is_reducible(tensor.scalar_type()) || tensor.scalar_type() == at::kBool)
    throw UsageError("a sparse tensor of dtype " + std::string(c10::toString(tensor.scalar_type())) +
                     " cannot be reduced; use float64, float32, float16, bfloat16, int8 to int64 or uint8");
}

// Every rank's rows, `counts[r]` of rank r, one after the other in the result. All of it is done with the work.
struct Gathering {
  at::Tensor all;
  WorkPtr work;
};

Gathering gather_rows(const at::Tensor& own, const std::vector<std::size_t>& counts, Communicator& comm,
                      const CallOptions& call) {
  auto sizes = own.sizes().vec();
  sizes.front() = static_cast<std::int64_t>(std::accumulate(counts.begin(), counts.end(), std::size_t{0}));
  Gathering gathering{at::empty(sizes, own.options()), nullptr};
  const auto row_elements =
      static_cast<std::size_t>(c10::multiply_integers(own.sizes().begin() + 1, own.sizes().end()));
  std::vector<std::size_t> elements;
  for (const std::size_t count : counts) elements.push_back(count * row_elements);
  gathering.work = comm.all_gather(pieces(contiguous_buffer(gathering.all), elements), contiguous_buffer(own), call);
  return gathering;
}

at::Tensor plain(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg().contiguous(); }

}  // namespace

// One operation.
struct SparseReducer::Call {
  std::shared_ptr<Work> work = std::make_shared<Work>();
  at::Tensor tensor;   // the result's
  at::Tensor indices;  // own elements, a row for each
  at::Tensor values;
  std::vector<SparseDescription> descriptions;  // by rank
  WorkPtr described;
  int rank = 0;
  Clock::time_point deadline;

  CallOptions options() const {
    // Too late: the next step says who is missing.
    return {.timeout = std::max<Duration>(deadline - Clock::now(), std::chrono::milliseconds(1)), .async = true};
  }
  void check_agreement() const;
  std::vector<std::size_t> counts() const;
  at::Tensor reduced(const at::Tensor& all_indices, const at::Tensor& all_values) const;
};

void SparseReducer::Call::check_agreement() const {
  for (std::size_t peer = 1; peer < descriptions.size(); ++peer) {
    if (descriptions[peer].agrees(descriptions.front())) continue;
    ErrorContext context;
    context.rank = rank;
    throw MismatchError("all_reduce of sparse tensors: rank 0 has " + descriptions.front().text() + ", rank " +
                            std::to_string(peer) + " has " + descriptions[peer].text() +
                            "; give tensors of one size, dtype and reduction",
                        context);
  }
}

std::vector<std::size_t> SparseReducer::Call::counts() const {
  std::vector<std::size_t> counts;
  for (const SparseDescription& one : descriptions) counts.push_back(static_cast<std::size_t>(one.elements));
  return counts;
}

at::Tensor SparseReducer::Call::reduced(const at::Tensor& all_indices, const at::Tensor& all_values) const {
  auto sum = at::_sparse_coo_tensor_unsafe(all_indices.t(), all_values, tensor.sizes(), tensor.options()).coalesce();
  if (static_cast<ReduceOp>(descriptions.front().reduction) == ReduceOp::avg)
    sum._values().div_(static_cast<std::int64_t>(descriptions.size()));
  return sum;
}

std::shared_ptr<Communicator> SparseReducer::State::get() const {
  const std::lock_guard lock(mutex);
  return communicator;
}

// Called by one thread at a time.
std::shared_ptr<Communicator> SparseReducer::State::get_or_make() {
  const auto check_open = [this] {
    if (!closed_because.empty()) throw AbortedError("all_reduce of a sparse tensor: " + closed_because);
  };
  {
    const std::lock_guard lock(mutex);
    check_open();
    if (communicator) return communicator;
  }
  auto made = make();
  const std::lock_guard lock(mutex);
  check_open();
  communicator = std::move(made);
  return communicator;
}

void SparseReducer::abort(const std::string& reason) {
  if (const auto communicator = state_->get()) communicator->abort(reason);
}

void SparseReducer::close(const std::string& reason) {
  std::shared_ptr<Communicator> communicator;  // closed after the lock is released
  {
    const std::lock_guard lock(state_->mutex);
    state_->closed_because = reason;
    communicator.swap(state_->communicator);
  }
  // Who waited for the last one may be here before the thread that ended it is idle: its peers are not to be aborted.
  if (communicator && !queue_.await_idle(std::chrono::seconds(1))) communicator->abort(reason);
}

WorkPtr SparseReducer::all_reduce(const at::Tensor& tensor, ReduceOp op, Communicator& comm, const CallOptions& call) {
  check_reducible(tensor, op);
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach().coalesce();
  auto made = std::make_shared<Call>();
  made->tensor = tensor;
  made->indices = plain(own._indices().t());
  made->values = plain(own._values());
  made->rank = comm.rank();
  made->deadline = Clock::now() + call.timeout.value_or(std::chrono::minutes(30));
  made->descriptions.resize(static_cast<std::size_t>(comm.size()));
  made->descriptions[static_cast<std::size_t>(comm.rank())] = describe(own, op);
  auto outputs = buffers_of(made->descriptions);
  for (Buffer& output : outputs) output.owner = made;
  const Buffer input = outputs[static_cast<std::size_t>(comm.rank())];
  made->described = comm.all_gather(std::move(outputs), input, made->options());
  queue_.run([state = state_, made] { finish(state, *made); });
  return made->work;
}

void SparseReducer::finish(const std::shared_ptr<State>& state, Call& call) {
  try {
    const at::NoGradGuard no_grad;
    call.work->mark_running();
    call.described->wait();
    call.check_agreement();
    const auto communicator = state->get_or_make();
    const auto counts = call.counts();
    const Gathering indices = gather_rows(call.indices, counts, *communicator, call.options());
    const Gathering values = gather_rows(call.values, counts, *communicator, call.options());
    indices.work->wait();
    values.work->wait();
    call.tensor.copy_(call.reduced(indices.all, values.all));
    call.tensor = at::Tensor();
    call.work->complete();
  } catch (...) {
    call.tensor = at::Tensor();
    call.work->fail(std::current_exception());
  }
}

}  // namespace holmes::torch_backend
