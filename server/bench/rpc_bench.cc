// spmmd_rpc_bench: what a call costs beyond its kernel. One process runs spmmd, another a bare gRPC echo with gRPC's
// own settings, which takes bytes and answers bytes without looking at them; a client process calls them turn by turn,
// one call in flight, with bytes made beforehand, so that both rows have the same client; then the same request with
// its tensors in shared memory, and through a ring. `overhead` is the call's time minus the time that its kernels took
// by the server's own clock; the `x echo` sets it against the unary echo of the same number of bytes; `x e+k` sets the
// call against that echo and the kernels together.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "server/app.h"
#include "server/bench/served.h"
#include "server/config/options.h"
#include "server/device/host_memory.h"
#include "server/pb.h"
#include "server/rpc/unary_call.h"
#include "spmm/v1/layer_catalog.grpc.pb.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::server {
namespace {

struct Flags {
  int64_t m = 4096;
  int64_t k = 4096;
  std::vector<int64_t> tokens = {1, 16};
  double sparsity = 0.5;
  int iterations = 2000;
  double seconds = 5;  // at most, for one row
  int turn = 32;
  std::vector<int> callers;
  int rate_callers = 0;
  int64_t rate_tokens = 32;
  int steps = 1;
  std::string backend = "auto";
  int64_t max_batch_tokens = 0;  // 0: the server's default
  std::string device_spin;       // empty: the server's default
  std::string csv;
};

// --- Server process
// ---------------------------------------------------------------------------------------------------

constexpr int kRateTurns = 3;
constexpr const char* kEcho = "/echo/Echo";
constexpr const char* kEchoStream = "/echo/EchoStream";

// Answers `response_bytes` bytes, a number that the first eight bytes of the request give; the rest of it is not looked
// at.
class Echo final : public grpc::ServerGenericBidiReactor {
 public:
  // `stream`: answers any number of messages.
  explicit Echo(bool stream) : stream_(stream) { StartRead(&request_); }
  void OnReadDone(bool ok) override {
    if (!ok) {
      Finish(grpc::Status::OK);
      return;
    }
    grpc::Slice first;
    std::vector<grpc::Slice> slices;
    uint64_t bytes = 0;
    if (request_.Dump(&slices).ok() && !slices.empty() && slices[0].size() >= sizeof(bytes)) {
      std::copy_n(slices[0].begin(), sizeof(bytes), reinterpret_cast<uint8_t*>(&bytes));
    }
    static const auto* const payload = new std::vector<uint8_t>(size_t{256} << 20);
    const grpc::Slice answer(payload->data(), std::min<size_t>(bytes, payload->size()), grpc::Slice::STATIC_SLICE);
    response_ = grpc::ByteBuffer(&answer, 1);
    if (stream_) {
      StartWrite(&response_);
    } else {
      StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
    }
  }
  void OnWriteDone(bool ok) override {
    if (stream_ && ok) StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  const bool stream_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
};

class EchoService final : public grpc::CallbackGenericService {
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
    return new Echo(context->method() == kEchoStream);
  }
};

// A chain of `steps` products with square layers.
pb::Program ChainOf(int steps) {
  pb::Program program;
  program.add_inputs("x");
  for (int s = 0; s < steps; ++s) {
    pb::Step& step = *program.add_steps();
    step.set_name(absl::StrCat("y", s));
    step.mutable_matmul()->mutable_layer()->set_name("w");
    step.mutable_matmul()->set_input(s == 0 ? "x" : absl::StrCat("y", s - 1));
  }
  pb::OutputSpec& output = *program.add_outputs();
  output.set_step(absl::StrCat("y", steps - 1));
  output.set_dtype(pb::DATA_TYPE_F16);
  return program;
}

pb::ExecuteRequest ChainRequest(const Flags& flags) {
  pb::ExecuteRequest request = MatmulRequest("w", flags.rate_tokens, flags.k);
  *request.mutable_program() = ChainOf(flags.steps);
  return request;
}

// Programs a second of `callers` at once in this process, each started when another ends; 0 when one failed.
double RateInProcess(Engine& engine, const Flags& flags) {
  struct Slot {
    pb::ExecuteResponse response;
    Payloads payloads;
  };
  const pb::ExecuteRequest request = ChainRequest(flags);
  const std::string program = request.program().SerializeAsString();
  std::vector<Slot> slots(static_cast<size_t>(flags.rate_callers));
  std::atomic<int64_t> ended{0};
  std::atomic<bool> failed{false};
  std::vector<std::thread> callers;
  const absl::Time start = absl::Now();
  const absl::Time end = start + absl::Seconds(flags.seconds);
  for (Slot& slot : slots) {
    callers.emplace_back([&] {
      while (absl::Now() < end && !failed) {
        absl::Notification done;
        Engine::Caller caller;
        slot.payloads.outputs.clear();
        caller.payloads = &slot.payloads;
        caller.known = engine.Recall(program);
        caller.program_bytes = program;
        engine.Execute(request, &slot.response, absl::InfiniteFuture(), caller, [&](const absl::Status& status) {
          if (!status.ok()) failed = true;
          done.Notify();
        });
        done.WaitForNotification();
        ended.fetch_add(1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  return failed ? 0 : static_cast<double>(ended.load()) / seconds;
}

// With flags.rate_callers, the rates in process go to `rates`, each after the first when a byte came from `turns`.
[[noreturn]] void RunSpmmd(const Flags& flags, const std::string& address, int rates, int turns) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  KeepFreedBlocks();  // as spmmd does
  spmm::config::v1::ServerConfig config;
  config.set_backend(flags.backend);
  if (!flags.device_spin.empty()) config.set_device_spin(flags.device_spin);
  if (flags.max_batch_tokens > 0) config.set_max_batch_tokens(flags.max_batch_tokens);
  auto options = MakeOptions(config);
  options->listen = {address};
  options->metrics_listen.clear();
  options->shared_memory = true;
  options->max_message_bytes = uint64_t{512} << 20;
  auto app = App::Start(*options);
  if (!app.ok() || !(*app)->LoadAndServe().ok()) {
    std::fprintf(stderr, "the server does not start: %s\n", std::string(app.status().message()).c_str());
    std::_Exit(1);
  }
  if (flags.rate_callers > 0) {
    pb::LayerSpec spec;
    spec.set_name("w");
    spec.set_m(flags.m);
    spec.set_k(flags.k);
    spec.set_format(pb::FORMAT_BITMAP);
    const absl::Status status = RegisterRandom((*app)->catalog(), spec, 1);
    if (!status.ok()) std::_Exit(1);
    RateInProcess((*app)->engine(), flags);  // warms up
    // Turns, so that both see the same state of the machine.
    for (int turn = 0; turn < kRateTurns; ++turn) {
      const double rate = RateInProcess((*app)->engine(), flags);
      if (write(rates, &rate, sizeof(rate)) != sizeof(rate)) std::_Exit(1);
      char go = 0;
      if (read(turns, &go, 1) != 1) std::_Exit(0);
    }
  }
  while (true) pause();
}

[[noreturn]] void RunEcho(const std::string& address) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  KeepFreedBlocks();
  EchoService echo;
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&echo);
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  const auto server = builder.BuildAndStart();
  if (server == nullptr) std::_Exit(1);
  server->Wait();
  std::_Exit(0);
}

// --- Client process
// ---------------------------------------------------------------------------------------------------

// One blocking unary call with ready bytes, over the callback stub: the same for both servers.
class RawCaller {
 public:
  RawCaller(const std::shared_ptr<grpc::Channel>& channel, std::string method)
      : method_(std::move(method)), stub_(std::make_unique<grpc::GenericStub>(channel)) {}

  // Seconds; negative when the call failed.
  double Call(const grpc::ByteBuffer& request, grpc::ByteBuffer* response) {
    std::promise<grpc::Status> done;
    grpc::ClientContext context;
    const auto start = std::chrono::steady_clock::now();
    stub_->UnaryCall(&context, method_, grpc::StubOptions(), &request, response,
                     [&](grpc::Status status) { done.set_value(std::move(status)); });
    const grpc::Status status = done.get_future().get();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (!status.ok()) {
      std::fprintf(stderr, "%s: %s\n", method_.c_str(), status.error_message().c_str());
      return -1;
    }
    return elapsed.count();
  }

 private:
  const std::string method_;
  const std::unique_ptr<grpc::GenericStub> stub_;
};

// A stream of ready bytes, one message in flight, read by the thread that waits: as the blocking stubs do.
class RawStream {
 public:
  RawStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method) : stub_(channel) {
    stream_ = stub_.PrepareCall(&context_, method, &queue_);
    stream_->StartCall(Tag(kStart));
    Await(kStart);
  }
  ~RawStream() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  RawStream(const RawStream&) = delete;
  RawStream& operator=(const RawStream&) = delete;

  // Seconds; negative when the stream has ended.
  double Exchange(const grpc::ByteBuffer& request, grpc::ByteBuffer* response) {
    const auto start = std::chrono::steady_clock::now();
    stream_->Write(request, Tag(kWrite));
    stream_->Read(response, Tag(kRead));
    const bool ok = Await(kWrite) && Await(kRead);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    return ok ? elapsed.count() : -1;
  }

 private:
  enum Operation : uint8_t { kStart, kWrite, kRead };
  static void* Tag(Operation operation) { return reinterpret_cast<void*>(static_cast<uintptr_t>(operation)); }
  bool Await(Operation operation) {
    while (!ended_[operation]) {
      void* tag = nullptr;
      bool ok = false;
      if (!queue_.Next(&tag, &ok) || !ok) return false;
      ended_[reinterpret_cast<uintptr_t>(tag)] = true;
    }
    ended_[operation] = false;
    return true;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  bool ended_[3] = {};
};

std::shared_ptr<grpc::Channel> NewChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

grpc::ByteBuffer ToBytes(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return {&slice, 1};
}

double Quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

bool RegisterLayer(const std::string& address, const Flags& flags) {
  std::mt19937 random(1);
  std::string values(static_cast<size_t>(flags.m * flags.k) * 2, '\0');
  auto* const bits = reinterpret_cast<uint16_t*>(values.data());
  const auto cut = static_cast<uint32_t>(flags.sparsity * 65536);
  for (int64_t i = 0; i < flags.m * flags.k; ++i) {
    const uint32_t word = random();
    // fp16 between 1 and 2 where not pruned.
    bits[i] = (word & 0xffff) < cut ? 0 : static_cast<uint16_t>(0x3c00 | (word >> 22));
  }
  const auto stub = pb::LayerCatalog::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  auto stream = stub->RegisterLayer(&context);
  pb::RegisterLayerRequest request;
  pb::LayerSpec* spec = request.mutable_spec();
  spec->set_name("w");
  spec->set_m(flags.m);
  spec->set_k(flags.k);
  spec->set_dtype(pb::DATA_TYPE_F16);
  spec->set_encoding(pb::SOURCE_ENCODING_DENSE);
  spec->set_format(pb::FORMAT_BITMAP);
  bool open = stream->Write(request);
  constexpr size_t kChunk = size_t{4} << 20;
  for (size_t offset = 0; open && offset < values.size(); offset += kChunk) {
    pb::ContentChunk* chunk = request.mutable_chunk();
    chunk->set_part(pb::CONTENT_PART_VALUES);
    chunk->set_offset(offset);
    chunk->set_data(values.substr(offset, kChunk));
    open = stream->Write(request);
  }
  stream->WritesDone();
  pb::RegisterLayerResponse response;
  while (stream->Read(&response)) {
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) std::fprintf(stderr, "register: %s\n", status.error_message().c_str());
  return status.ok();
}

pb::ExecuteRequest MakeRequest(const Flags& flags, int64_t n) {
  pb::ExecuteRequest request;
  request.mutable_program()->add_inputs("x");
  pb::Step* step = request.mutable_program()->add_steps();
  step->set_name("y");
  step->mutable_matmul()->mutable_layer()->set_name("w");
  step->mutable_matmul()->set_input("x");
  pb::OutputSpec* output = request.mutable_program()->add_outputs();
  output->set_step("y");
  output->set_dtype(pb::DATA_TYPE_F16);
  pb::NamedInput* input = request.add_inputs();
  input->set_name("x");
  input->mutable_dense()->set_dtype(pb::DATA_TYPE_F16);
  input->mutable_dense()->add_shape(n);
  input->mutable_dense()->add_shape(flags.k);
  std::string* data = input->mutable_dense()->mutable_data();
  data->resize(static_cast<size_t>(n * flags.k) * 2);
  for (size_t i = 1; i < data->size(); i += 2) (*data)[i] = 0x38;  // 0.5
  return request;
}

double Seconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) + static_cast<double>(duration.nanos()) * 1e-9;
}

struct Row {
  std::string name;
  int64_t n = 0;
  size_t request_bytes = 0;
  size_t response_bytes = 0;
  std::vector<double> call;
  std::vector<double> overhead;  // call less kernel
  std::vector<double> kernel;
  std::vector<double> server;  // ExecuteTiming.total less kernel
};

// Calls `left` and `right` in turns of --turn calls each.
void TurnByTurn(const Flags& flags, const std::function<bool()>& left, const std::function<bool()>& right) {
  const absl::Time end = absl::Now() + absl::Seconds(flags.seconds);
  for (int i = 0; i < flags.iterations && absl::Now() < end; i += flags.turn) {
    for (const std::function<bool()>& call : {left, right}) {
      for (int t = 0; t < flags.turn; ++t) {
        if (!call()) std::_Exit(1);
      }
    }
  }
}

void Print(std::FILE* out, const Row& row, double echo_p50, bool csv) {
  const double overhead = Quantile(row.overhead, 0.5);
  const std::string line = absl::StrFormat(
      csv ? "%s,%d,%d,%d,%d,%.1f,%.1f,%.1f,%.1f,%.1f,%.3f,%.3f\n"
          : "%-22s %5d %9d %9d %6d %9.1f %9.1f %9.1f %9.1f %11.1f %7.2f %7.2f\n",
      row.name, row.n, row.request_bytes, row.response_bytes, row.call.size(), Quantile(row.call, 0.5) * 1e6,
      Quantile(row.call, 0.99) * 1e6, Quantile(row.kernel, 0.5) * 1e6, Quantile(row.server, 0.5) * 1e6, overhead * 1e6,
      overhead / echo_p50, Quantile(row.call, 0.5) / (echo_p50 + Quantile(row.kernel, 0.5)));
  std::fputs(line.c_str(), out);
}

// `callers` calls in flight at all times, each started when another ends; over `connections` connections.
class Crowd {
 public:
  Crowd(const std::string& address, int callers, int connections, const grpc::ByteBuffer& request)
      : request_(request), slots_(callers) {
    for (int c = 0; c < connections; ++c) stubs_.push_back(std::make_unique<grpc::GenericStub>(NewChannel(address)));
    for (size_t s = 0; s < slots_.size(); ++s) slots_[s].stub = stubs_[s % stubs_.size()].get();
  }

  // Calls a second.
  double Run(double seconds) {
    const auto start = std::chrono::steady_clock::now();
    end_ =
        start + std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
    open_ = static_cast<int>(slots_.size());
    for (Slot& slot : slots_) Start(slot);
    ended_.get_future().wait();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    for (const Slot& slot : slots_) latencies_.insert(latencies_.end(), slot.latencies.begin(), slot.latencies.end());
    return static_cast<double>(latencies_.size()) / elapsed.count();
  }
  const std::vector<double>& latencies() const { return latencies_; }
  int failures() const { return failures_; }

 private:
  struct Slot {
    grpc::GenericStub* stub = nullptr;
    std::unique_ptr<grpc::ClientContext> context;
    grpc::ByteBuffer response;
    std::vector<double> latencies;
  };

  void Start(Slot& slot) {
    slot.context = std::make_unique<grpc::ClientContext>();
    const auto start = std::chrono::steady_clock::now();
    slot.stub->UnaryCall(slot.context.get(), "/spmm.v1.SparseMatmul/Execute", grpc::StubOptions(), &request_,
                         &slot.response, [this, &slot, start](const grpc::Status& status) {
                           const auto now = std::chrono::steady_clock::now();
                           if (status.ok()) {
                             slot.latencies.push_back(std::chrono::duration<double>(now - start).count());
                           } else {
                             failures_.fetch_add(1);
                           }
                           if (now < end_) {
                             Start(slot);
                           } else if (open_.fetch_sub(1) == 1) {
                             ended_.set_value();
                           }
                         });
  }

  std::vector<std::unique_ptr<grpc::GenericStub>> stubs_;
  const grpc::ByteBuffer& request_;
  std::vector<Slot> slots_;
  std::chrono::steady_clock::time_point end_;
  std::atomic<int> open_{0};
  std::atomic<int> failures_{0};
  std::promise<void> ended_;
  std::vector<double> latencies_;
};

int RunCrowds(const Flags& flags, const std::string& address) {
  if (flags.callers.empty()) return 0;
  const grpc::ByteBuffer request = ToBytes(MakeRequest(flags, 1));
  std::printf("%-22s %5s %12s %9s %9s %7s\n", "row", "N", "calls/s", "p50", "p99", "x one");
  double one = 0;
  for (const int callers : flags.callers) {
    Crowd crowd(address, callers, /*connections=*/1, request);
    const double rate = crowd.Run(flags.seconds);
    if (crowd.failures() > 0) {
      std::fprintf(stderr, "%d calls failed\n", crowd.failures());
      return 1;
    }
    if (one == 0) one = rate;
    std::printf("%-22s %5d %12.0f %9.1f %9.1f %7.2f\n", absl::StrCat(callers, " callers").c_str(), 1, rate,
                Quantile(crowd.latencies(), 0.5) * 1e6, Quantile(crowd.latencies(), 0.99) * 1e6, rate / one);
  }
  return 0;
}

// The request with x and y in a region: where they are, and copied from and to the caller's own memory; then an entry
// of a ring.
bool RunShared(const Flags& flags, client::Client& client, const pb::ExecuteRequest& message, RawCaller* execute,
               const std::function<bool()>& echo, std::vector<Row>* rows) {
  const pb::Tensor& x = message.inputs(0).dense();
  const int64_t n = x.shape(0);
  const uint64_t x_bytes = x.data().size();
  const uint64_t y_bytes = static_cast<uint64_t>(n * flags.m) * 2;
  const uint64_t y_offset = (x_bytes + 4095) / 4096 * 4096;
  auto region = client.CreateRegion(y_offset + y_bytes);
  if (!region.ok()) {
    std::fprintf(stderr, "region: %s\n", std::string(region.status().message()).c_str());
    return false;
  }
  pb::ExecuteRequest placed = message;
  *placed.mutable_inputs(0) = client::MakeInput("x", **region, 0, pb::DATA_TYPE_F16, n, flags.k);
  *placed.mutable_program()->mutable_outputs(0)->mutable_region() = (*region)->Slice(y_offset, y_bytes);
  auto program = client.RegisterProgram(message.program());
  if (!program.ok()) return false;
  client::RingOptions options;
  options.program_ids = {*program};
  options.tensor_bytes = y_offset + y_bytes;
  auto ring = client.OpenRing(options);
  if (!ring.ok()) {
    std::fprintf(stderr, "ring: %s\n", std::string(ring.status().message()).c_str());
    return false;
  }
  std::copy_n(x.data().data(), x_bytes, reinterpret_cast<char*>((*region)->data()));
  std::copy_n(x.data().data(), x_bytes, (*ring)->As<char>(0, x_bytes).data());
  std::string y(y_bytes, '\0');
  grpc::ByteBuffer response;
  // The request is small: a caller that keeps its tensors in a region makes it anew each time.
  const auto call = [&](Row* row, bool copied) {
    const auto start = std::chrono::steady_clock::now();
    if (copied) std::copy_n(x.data().data(), x_bytes, reinterpret_cast<char*>((*region)->data()));
    if (execute->Call(ToBytes(placed), &response) < 0) return false;
    if (copied) std::copy_n(reinterpret_cast<const char*>((*region)->data()) + y_offset, y_bytes, y.data());
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    pb::ExecuteResponse parsed;
    if (!ParseMessage(&response, &parsed).ok()) return false;
    row->call.push_back(elapsed.count());
    row->kernel.push_back(Seconds(parsed.timing().kernel()));
    row->server.push_back(Seconds(parsed.timing().total()) - row->kernel.back());
    row->overhead.push_back(row->call.back() - row->kernel.back());
    return true;
  };
  const client::Ring::Tensor input{0, flags.k, pb::DATA_TYPE_F16};
  const client::Ring::Tensor output{y_offset, flags.m, pb::DATA_TYPE_F16};
  const auto entry = [&](Row* row) {
    const auto start = std::chrono::steady_clock::now();
    const auto result = (*ring)->Execute({.rows = n, .inputs = {&input, 1}, .outputs = {&output, 1}});
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (!result.ok() || !result->status.ok()) {
      std::fprintf(stderr, "ring: %s\n",
                   std::string((result.ok() ? result->status : result.status()).message()).c_str());
      return false;
    }
    row->call.push_back(elapsed.count());
    row->kernel.push_back(absl::ToDoubleSeconds(result->kernel));
    row->server.push_back(absl::ToDoubleSeconds(result->total) - row->kernel.back());
    row->overhead.push_back(row->call.back() - row->kernel.back());
    return true;
  };
  Row ignored = (*rows)[0];
  for (int i = 0; i < 20; ++i) {
    if (!call(&ignored, false) || !entry(&ignored)) return false;
  }
  TurnByTurn(flags, echo, [&] { return call(&(*rows)[0], false); });
  TurnByTurn(flags, echo, [&] { return call(&(*rows)[1], true); });
  // By itself: a ring's caller does nothing between two entries that would put the ring's thread to sleep.
  TurnByTurn(
      flags, [] { return true; }, [&] { return entry(&(*rows)[2]); });
  return true;
}

int RunClient(const Flags& flags, const std::string& spmmd_address, const std::string& echo_address) {
  if (!RegisterLayer(spmmd_address, flags)) return 1;
  std::FILE* const csv = flags.csv.empty() ? nullptr : std::fopen(flags.csv.c_str(), "w");
  if (csv != nullptr) {
    std::fputs(
        "row,N,request_bytes,response_bytes,calls,us_p50,us_p99,kernel_us_p50,server_us_p50,overhead_us_p50,"
        "overhead_vs_echo,call_vs_echo_and_kernel\n",
        csv);
  }
  std::printf(
      "M=%d K=%d fp16 sparsity=%.2f; times in us; overhead = call - kernel; server = time in spmmd's own code less "
      "kernel\n",
      static_cast<int>(flags.m), static_cast<int>(flags.k), flags.sparsity);
  std::printf("%-22s %5s %9s %9s %6s %9s %9s %9s %9s %11s %7s %7s\n", "row", "N", "req B", "resp B", "calls", "p50",
              "p99", "kernel", "server", "overhead", "x echo", "x e+k");
  // Of one connection: regions belong to it.
  const auto channel = NewChannel(spmmd_address);
  const std::unique_ptr<client::Client> client = client::Client::FromChannel(channel);
  RawCaller execute(channel, "/spmm.v1.SparseMatmul/Execute");
  RawCaller echo(NewChannel(echo_address), kEcho);
  for (const int64_t n : flags.tokens) {
    const pb::ExecuteRequest message = MakeRequest(flags, n);
    const grpc::ByteBuffer request = ToBytes(message);
    grpc::ByteBuffer response;
    for (int i = 0; i < 20; ++i) {
      if (execute.Call(request, &response) < 0) return 1;
    }
    const uint64_t response_bytes = response.Length();
    std::string echo_bytes(request.Length(), '\0');
    std::copy_n(reinterpret_cast<const char*>(&response_bytes), sizeof(response_bytes), echo_bytes.begin());
    const grpc::Slice echo_slice(echo_bytes);
    const grpc::ByteBuffer echo_request(&echo_slice, 1);
    grpc::ByteBuffer echo_response;
    for (int i = 0; i < 20; ++i) {
      if (echo.Call(echo_request, &echo_response) < 0) return 1;
    }
    Row bare{"bare echo", n, request.Length(), response.Length(), {}, {}, {}, {}};
    Row unary{"Execute", n, request.Length(), response.Length(), {}, {}, {}, {}};
    TurnByTurn(
        flags,
        [&] {
          bare.call.push_back(echo.Call(echo_request, &echo_response));
          bare.overhead.push_back(bare.call.back());
          return bare.call.back() >= 0;
        },
        [&] {
          unary.call.push_back(execute.Call(request, &response));
          if (unary.call.back() < 0) return false;
          pb::ExecuteResponse parsed;
          if (!ParseMessage(&response, &parsed).ok()) return false;
          unary.kernel.push_back(Seconds(parsed.timing().kernel()));
          unary.server.push_back(Seconds(parsed.timing().total()) - unary.kernel.back());
          unary.overhead.push_back(unary.call.back() - unary.kernel.back());
          return true;
        });
    const double echo_p50 = Quantile(bare.call, 0.5);
    for (const Row* row : {&bare, &unary}) {
      Print(stdout, *row, echo_p50, /*csv=*/false);
      if (csv != nullptr) Print(csv, *row, echo_p50, /*csv=*/true);
    }

    // The same requests on an open stream, and bare echoes on one, both against the unary echo.
    RawStream spmmd_stream(NewChannel(spmmd_address), "/spmm.v1.SparseMatmul/ExecuteStream");
    RawStream echo_stream(NewChannel(echo_address), kEchoStream);
    pb::ExecuteStreamRequest stream_request;
    *stream_request.mutable_request() = message;
    const grpc::ByteBuffer stream_bytes = ToBytes(stream_request);
    Row echoed{"bare echo, stream", n, request.Length(), response.Length(), {}, {}, {}, {}};
    Row streamed{"ExecuteStream", n, request.Length(), response.Length(), {}, {}, {}, {}};
    Row bare_again = bare;
    bare_again.call.clear();
    const auto echo_unary = [&] {
      bare_again.call.push_back(echo.Call(echo_request, &echo_response));
      return bare_again.call.back() >= 0;
    };
    TurnByTurn(flags, echo_unary, [&] {
      echoed.call.push_back(echo_stream.Exchange(echo_request, &echo_response));
      echoed.overhead.push_back(echoed.call.back());
      return echoed.call.back() >= 0;
    });
    TurnByTurn(flags, echo_unary, [&] {
      streamed.call.push_back(spmmd_stream.Exchange(stream_bytes, &response));
      if (streamed.call.back() < 0) return false;
      pb::ExecuteStreamResponse parsed;
      if (!ParseMessage(&response, &parsed).ok() || !parsed.has_response()) return false;
      streamed.kernel.push_back(Seconds(parsed.response().timing().kernel()));
      streamed.server.push_back(Seconds(parsed.response().timing().total()) - streamed.kernel.back());
      streamed.overhead.push_back(streamed.call.back() - streamed.kernel.back());
      return true;
    });
    const double again_p50 = Quantile(bare_again.call, 0.5);
    for (const Row* row : {&echoed, &streamed}) {
      Print(stdout, *row, again_p50, /*csv=*/false);
      if (csv != nullptr) Print(csv, *row, again_p50, /*csv=*/true);
    }

    bare_again.call.clear();
    const auto echo_again = [&] {
      bare_again.call.push_back(echo.Call(echo_request, &echo_response));
      return bare_again.call.back() >= 0;
    };
    std::vector<Row> shared = {{"Execute in region", n, request.Length(), response.Length(), {}, {}, {}, {}},
                               {"Execute, copied", n, request.Length(), response.Length(), {}, {}, {}, {}},
                               {"ring", n, request.Length(), response.Length(), {}, {}, {}, {}}};
    if (!RunShared(flags, *client, message, &execute, echo_again, &shared)) return 1;
    for (const Row& row : shared) {
      Print(stdout, row, Quantile(bare_again.call, 0.5), /*csv=*/false);
      if (csv != nullptr) Print(csv, row, Quantile(bare_again.call, 0.5), /*csv=*/true);
    }
  }
  if (csv != nullptr) std::fclose(csv);
  return RunCrowds(flags, spmmd_address);
}

// The same program in the server's process and over the network, turn by turn.
int RunRates(const Flags& flags, const std::string& address, int rates, int turns) {
  const grpc::ByteBuffer request = ToBytes(ChainRequest(flags));
  std::printf("M=%d K=%d, %d steps, N=%d, %d callers, %s\n", static_cast<int>(flags.m), static_cast<int>(flags.k),
              flags.steps, static_cast<int>(flags.rate_tokens), flags.rate_callers, address.c_str());
  std::printf("%14s %14s %7s\n", "in process/s", "over gRPC/s", "ratio");
  for (int turn = 0; turn < kRateTurns; ++turn) {
    double in_process = 0;
    if (read(rates, &in_process, sizeof(in_process)) != sizeof(in_process) || in_process == 0) return 1;
    Crowd crowd(address, flags.rate_callers, std::min(flags.rate_callers, 8), request);
    const double rate = crowd.Run(flags.seconds);
    if (crowd.failures() > 0) return 1;
    std::printf("%14.0f %14.0f %7.3f\n", in_process, rate, rate / in_process);
    if (write(turns, "x", 1) != 1) return 1;
  }
  return 0;
}

// A port of the loopback address that is free now.
int FreePort() {
  const int socket_fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  if (bind(socket_fd, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      getsockname(socket_fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return 0;
  }
  close(socket_fd);
  return ntohs(address.sin_port);
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("What a unary Execute costs over a bare gRPC echo of the same bytes, on Unix sockets.");
  app.add_option("--m", flags.m, "Rows of W")->check(CLI::Range(1, 1 << 20));
  app.add_option("--k", flags.k, "Columns of W")->check(CLI::Range(1, 1 << 20));
  app.add_option("--tokens", flags.tokens, "Batch widths N")->delimiter(',')->check(CLI::Range(1, 65536));
  app.add_option("--sparsity", flags.sparsity, "Share of zeros")->check(CLI::Range(0.0, 1.0));
  app.add_option("--iterations", flags.iterations, "Calls of each row, at most")->check(CLI::Range(10, 1000000));
  app.add_option("--seconds", flags.seconds, "Time of each pair of rows, at most")->check(CLI::Range(0.1, 3600.0));
  app.add_option("--turn", flags.turn, "Calls of one row before it is the other's turn")->check(CLI::Range(1, 1000000));
  app.add_option("--callers", flags.callers, "Then: calls of one token in flight at a time; the first is the measure")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096));
  app.add_option("--rate-callers", flags.rate_callers,
                 "Instead of all that: programs a second of so many callers, in process and over loopback TCP")
      ->check(CLI::Range(1, 4096));
  app.add_option("--rate-tokens", flags.rate_tokens, "Their N")->check(CLI::Range(1, 65536));
  app.add_option("--steps", flags.steps, "Products in a chain that make up their program")->check(CLI::Range(1, 64));
  app.add_option("--max-batch-tokens", flags.max_batch_tokens, "Of the server; 1 runs every request alone");
  app.add_option("--device-spin", flags.device_spin, "Of the server");
  app.add_option("--backend", flags.backend, "auto, cpu or cuda");
  app.add_option("--csv", flags.csv, "Also write the rows here");
  CLI11_PARSE(app, argc, argv);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // what was measured shows, whatever comes next

  std::string directory = "/tmp/spmmd_rpc_bench_XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) return 1;
  const std::string spmmd_address =
      flags.rate_callers > 0 ? absl::StrCat("127.0.0.1:", FreePort()) : absl::StrCat("unix:", directory, "/spmmd");
  int rates[2] = {};
  int turns[2] = {};
  if (pipe(rates) != 0 || pipe(turns) != 0) return 1;
  const std::string echo_address = absl::StrCat("unix:", directory, "/echo");
  // Before anything of gRPC runs: it does not survive a fork.
  const pid_t server = fork();
  if (server == 0) RunSpmmd(flags, spmmd_address, rates[1], turns[0]);
  const pid_t echo = fork();
  if (echo == 0) RunEcho(echo_address);
  const int result = flags.rate_callers > 0 ? RunRates(flags, spmmd_address, rates[0], turns[1])
                                            : RunClient(flags, spmmd_address, echo_address);
  for (const pid_t child : {server, echo}) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  for (const char* name : {"/spmmd", "/echo"}) unlink(absl::StrCat(directory, name).c_str());
  rmdir(directory.c_str());
  std::fflush(stdout);
  std::_Exit(result);  // gRPC's own exit can take ten seconds
}

}  // namespace
}  // namespace spmmd::server

int main(int argc, char** argv) { return spmmd::server::Main(argc, argv); }
