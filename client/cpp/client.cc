#include "client/cpp/client.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/connection.h"
#include "client/cpp/region_transport.h"
#include "client/cpp/status.h"
#include "client/cpp/upload.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "spmm/v1/layer_catalog.grpc.pb.h"
#include "spmm/v1/sparse_matmul.grpc.pb.h"

namespace spmmd::client {
namespace {

constexpr char kMatmulInput[] = "x";
constexpr char kMatmulOutput[] = "y";

constexpr int kUploadAttempts = 4;
// Before an upload whose connection broke goes on over a new one; doubled twice.
constexpr absl::Duration kFirstUploadPause = absl::Milliseconds(250);

std::string_view LayerOf(const v1::Program& program) {
  for (const v1::Step& step : program.steps()) {
    if (step.has_matmul()) return step.matmul().layer().name();
  }
  return {};
}

// The layer that a request is about, the first one of a program; empty when there is none.
template <typename Request>
std::string_view LayerOf(const Request& request) {
  if constexpr (requires { request.layer(); }) return request.layer().name();
  if constexpr (requires { request.program(); }) return LayerOf(request.program());
  return {};
}

// Protocol Buffers cannot carry more in one message.
constexpr size_t kMaxMessageBytes = std::numeric_limits<int32_t>::max();

}  // namespace

struct Client::State {
  explicit State(std::shared_ptr<Connection> to)
      : connection(std::move(to)),
        catalog(v1::LayerCatalog::NewStub(connection->channel())),
        matmul(v1::SparseMatmul::NewStub(connection->channel())),
        health(::grpc::health::v1::Health::NewStub(connection->channel())),
        shared(connection, matmul.get()),
        transport(&shared) {}

  // One unary call of any of the services.
  template <typename Stub, typename Request, typename Response>
  absl::StatusOr<Response> Call(Stub& stub,
                                grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                                const Request& request, const CallOptions& call, absl::Duration default_timeout) {
    if (const size_t bytes = request.ByteSizeLong(); bytes > kMaxMessageBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("the request has ", bytes, " bytes; a message carries at most ", kMaxMessageBytes));
    }
    grpc::ClientContext context;
    absl::Status prepared = connection->Prepare(context, call, default_timeout, LayerOf(request));
    if (!prepared.ok()) return prepared;
    Response response;
    const grpc::Status status = (stub.*method)(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }

  template <typename Request, typename Response>
  absl::StatusOr<Response> Catalog(grpc::Status (v1::LayerCatalog::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                                  Response*),
                                   const Request& request, const CallOptions& call) {
    return Call(*catalog, method, request, call, connection->options().timeout);
  }

  template <typename Request, typename Response>
  absl::StatusOr<Response> Matmul(grpc::Status (v1::SparseMatmul::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                                 Response*),
                                  const Request& request, const CallOptions& call) {
    return Call(*matmul, method, request, call, connection->options().timeout);
  }

  std::shared_ptr<Connection> connection;
  std::unique_ptr<v1::LayerCatalog::Stub> catalog;
  std::unique_ptr<v1::SparseMatmul::Stub> matmul;
  std::unique_ptr<::grpc::health::v1::Health::Stub> health;
  SharedMemory shared;
  RegionTransport transport;
};

Client::Client(std::unique_ptr<State> state) : state_(std::move(state)) {}
Client::~Client() = default;

absl::StatusOr<std::unique_ptr<Client>> Client::Connect(std::string_view address, const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<Connection>> connection = Connection::Open(address, options);
  if (!connection.ok()) return connection.status();
  return std::unique_ptr<Client>(new Client(std::make_unique<State>(*std::move(connection))));
}

std::unique_ptr<Client> Client::FromChannel(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options) {
  return std::unique_ptr<Client>(new Client(std::make_unique<State>(Connection::Wrap(std::move(channel), options))));
}

absl::StatusOr<RegisterResult> Client::Register(const v1::LayerSpec& spec, const LayerContent& content,
                                                const RegisterOptions& options) {
  if (spec.has_file()) {
    return absl::InvalidArgumentError("spec.file: set beside content; use RegisterFile for a file of the server");
  }
  if (absl::Status status = content.Check(); !status.ok()) return status;
  v1::LayerSpec described = spec;
  content.Describe(described);
  if (described.content_xxh3().empty()) described.set_content_xxh3(content.Xxh3());
  return Upload(described, &content, options);
}

absl::StatusOr<RegisterResult> Client::RegisterFile(const v1::LayerSpec& spec, const RegisterOptions& options) {
  if (!spec.has_file()) return absl::InvalidArgumentError("spec.file: not set; use Register to send content");
  return Upload(spec, nullptr, options);
}

absl::StatusOr<RegisterResult> Client::Upload(const v1::LayerSpec& spec, const LayerContent* content,
                                              const RegisterOptions& options) {
  Connection& connection = *state_->connection;
  const absl::Time start = absl::Now();
  absl::Duration pause = kFirstUploadPause;
  bool under_way = false;
  for (int attempt = 1;; ++attempt) {
    CallOptions call = options.call;
    if (call.timeout.has_value()) *call.timeout -= absl::Now() - start;
    grpc::ClientContext context;
    absl::Status prepared = connection.Prepare(context, call, absl::InfiniteDuration(), spec.name());
    if (!prepared.ok()) return prepared;
    absl::StatusOr<RegisterResult> result = RunUpload(connection.channel(), context, spec, content,
                                                      connection.options().chunk_bytes, options.progress, &under_way);
    if (result.ok() || attempt == kUploadAttempts) return result;
    // The server relied on somebody else who was bringing the same content and did not finish. This caller has it too.
    if (ErrorReason(result.status()) == "CONTENT_SOURCE_LOST") continue;
    // A connection that broke during an upload: the server says what it still has.
    if (!absl::IsUnavailable(result.status()) || !under_way) return result;
    if (call.timeout.has_value() && pause > *call.timeout) return result;
    absl::SleepFor(pause);
    pause *= 2;
  }
}

absl::StatusOr<std::vector<v1::Layer>> Client::List(std::string_view name_prefix, const CallOptions& call) {
  v1::ListLayersRequest request;
  request.set_name_prefix(std::string(name_prefix));
  std::vector<v1::Layer> layers;
  while (true) {
    absl::StatusOr<v1::ListLayersResponse> page = state_->Catalog(&v1::LayerCatalog::Stub::ListLayers, request, call);
    if (!page.ok()) return page.status();
    for (v1::Layer& layer : *page->mutable_layers()) layers.push_back(std::move(layer));
    if (page->next_page_token().empty()) return layers;
    if (page->next_page_token() == request.page_token()) {
      return absl::InternalError("the server sent the same page token twice");
    }
    request.set_page_token(page->next_page_token());
  }
}

absl::StatusOr<v1::Layer> Client::Get(const v1::LayerRef& layer, const CallOptions& call) {
  v1::GetLayerRequest request;
  *request.mutable_layer() = layer;
  auto response = state_->Catalog(&v1::LayerCatalog::Stub::GetLayer, request, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_layer());
}

absl::StatusOr<v1::UnregisterLayerResponse> Client::Unregister(const v1::LayerRef& layer, const CallOptions& call) {
  v1::UnregisterLayerRequest request;
  *request.mutable_layer() = layer;
  return state_->Catalog(&v1::LayerCatalog::Stub::UnregisterLayer, request, call);
}

absl::StatusOr<v1::Layer> Client::Pin(const v1::LayerRef& layer, bool pinned, const CallOptions& call) {
  v1::PinLayerRequest request;
  *request.mutable_layer() = layer;
  request.set_pinned(pinned);
  auto response = state_->Catalog(&v1::LayerCatalog::Stub::PinLayer, request, call);
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_layer());
}

absl::StatusOr<v1::Layer> Client::Warm(const v1::LayerRef& layer, const CallOptions& call) {
  v1::WarmLayerRequest request;
  *request.mutable_layer() = layer;
  auto response =
      state_->Call(*state_->catalog, &v1::LayerCatalog::Stub::WarmLayer, request, call, absl::InfiniteDuration());
  if (!response.ok()) return response.status();
  return std::move(*response->mutable_layer());
}

absl::StatusOr<std::vector<v1::LayerSpeed>> Client::Benchmark(const v1::BenchmarkRequest& request,
                                                              const CallOptions& call) {
  auto response =
      state_->Call(*state_->catalog, &v1::LayerCatalog::Stub::Benchmark, request, call, absl::InfiniteDuration());
  if (!response.ok()) return response.status();
  return std::vector<v1::LayerSpeed>(response->speeds().begin(), response->speeds().end());
}

absl::StatusOr<MatmulResult> Client::Matmul(std::string_view layer, const DenseRows& x, const MatmulOptions& options) {
  return MatmulInput(layer, MakeInput(kMatmulInput, x), options);
}

absl::StatusOr<MatmulResult> Client::Matmul(std::string_view layer, const SparseRows& x, const MatmulOptions& options) {
  return MatmulInput(layer, MakeInput(kMatmulInput, x), options);
}

absl::StatusOr<MatmulResult> Client::MatmulInput(std::string_view layer, absl::StatusOr<v1::NamedInput> input,
                                                 const MatmulOptions& options) {
  if (!input.ok()) return input.status();
  v1::ExecuteRequest request;
  *request.mutable_program() = ProgramBuilder()
                                   .Input(kMatmulInput)
                                   .Matmul(kMatmulOutput, layer, kMatmulInput,
                                           {.activation = options.activation,
                                            .activation_threshold = options.activation_threshold,
                                            .ignore_bias = options.ignore_bias,
                                            .version = options.version})
                                   .Output(kMatmulOutput, options.output_dtype)
                                   .Build();
  *request.add_inputs() = *std::move(input);
  absl::StatusOr<v1::ExecuteResponse> response = Execute(request, options.call);
  if (!response.ok()) return response.status();
  absl::StatusOr<Matrix> y = TakeOutput(*response, kMatmulOutput);
  if (!y.ok()) return y.status();
  return MatmulResult{*std::move(y), response->timing()};
}

absl::StatusOr<v1::ExecuteResponse> Client::Execute(const v1::ExecuteRequest& request, const CallOptions& call) {
  const auto send = [&](const v1::ExecuteRequest& message) {
    return state_->Matmul(&v1::SparseMatmul::Stub::Execute, message, call);
  };
  if (!state_->connection->local() || !state_->connection->options().shared_memory) return send(request);
  return state_->transport.Execute(request, send);
}

absl::StatusOr<v1::ExecuteResponse> Client::Execute(const v1::Program& program,
                                                    absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
                                                    const CallOptions& call) {
  v1::ExecuteRequest request;
  *request.mutable_program() = program;
  for (const auto& [name, rows] : inputs) {
    absl::StatusOr<v1::NamedInput> input = MakeInput(name, rows);
    if (!input.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("input '", std::string(name), "': ", input.status().message()));
    }
    *request.add_inputs() = *std::move(input);
  }
  return Execute(request, call);
}

absl::StatusOr<std::string> Client::RegisterProgram(const v1::Program& program, const CallOptions& call) {
  v1::RegisterProgramRequest request;
  *request.mutable_program() = program;
  auto response = state_->Matmul(&v1::SparseMatmul::Stub::RegisterProgram, request, call);
  if (!response.ok()) return response.status();
  return response->program_id();
}

absl::Status Client::UnregisterProgram(std::string_view program_id, const CallOptions& call) {
  v1::UnregisterProgramRequest request;
  request.set_program_id(std::string(program_id));
  return state_->Matmul(&v1::SparseMatmul::Stub::UnregisterProgram, request, call).status();
}

absl::StatusOr<std::unique_ptr<Stream>> Client::OpenStream(const CallOptions& call) {
  auto context = std::make_unique<grpc::ClientContext>();
  if (absl::Status status = state_->connection->Prepare(*context, call, absl::InfiniteDuration()); !status.ok()) {
    return status;
  }
  return std::unique_ptr<Stream>(new Stream(*state_->matmul, std::move(context)));
}

absl::StatusOr<std::unique_ptr<SharedRegion>> Client::CreateRegion(uint64_t bytes, const CallOptions& call) {
  return state_->shared.Create(bytes, call);
}

absl::StatusOr<std::unique_ptr<Ring>> Client::OpenRing(const RingOptions& options, const CallOptions& call) {
  return Ring::Open(&state_->shared, options, call);
}

absl::StatusOr<v1::ServerInfoResponse> Client::ServerInfo(const CallOptions& call) {
  return state_->Matmul(&v1::SparseMatmul::Stub::ServerInfo, v1::ServerInfoRequest(), call);
}

absl::StatusOr<std::vector<v1::Device>> Client::DeviceInfo(const CallOptions& call) {
  auto response = state_->Matmul(&v1::SparseMatmul::Stub::DeviceInfo, v1::DeviceInfoRequest(), call);
  if (!response.ok()) return response.status();
  return std::vector<v1::Device>(response->devices().begin(), response->devices().end());
}

absl::Status Client::CheckHealth(std::string_view service, const CallOptions& call) {
  using ::grpc::health::v1::HealthCheckResponse;
  ::grpc::health::v1::HealthCheckRequest request;
  request.set_service(std::string(service));
  auto response = state_->Call(*state_->health, &::grpc::health::v1::Health::Stub::Check, request, call,
                               state_->connection->options().timeout);
  if (!response.ok()) return response.status();
  if (response->status() == HealthCheckResponse::SERVING) return absl::OkStatus();
  const std::string name = service.empty() ? std::string("the server") : absl::StrCat("service ", std::string(service));
  return absl::UnavailableError(
      absl::StrCat(name, " is ", HealthCheckResponse::ServingStatus_Name(response->status())));
}

absl::Status Client::WaitUntilHealthy(absl::Duration timeout) {
  constexpr absl::Duration kPause = absl::Milliseconds(50);
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    const absl::Duration left = std::max(deadline - absl::Now(), absl::Milliseconds(1));
    absl::Status status = CheckHealth("", {.timeout = left, .wait_for_ready = true});
    const bool unreachable = absl::IsDeadlineExceeded(status);
    if (!absl::IsUnavailable(status) && !unreachable) return status;
    if (unreachable || absl::Now() + kPause > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("not healthy within ", absl::FormatDuration(timeout), ": ",
                                                      unreachable ? "no server answers" : status.message()));
    }
    absl::SleepFor(kPause);
  }
}

}  // namespace spmmd::client
