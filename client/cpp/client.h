// A connection to spmmd: registers layers and multiplies with them.
//
//   auto client = spmmd::client::Client::Connect("127.0.0.1:8500");
//   if (!client.ok()) return client.status();
//   v1::LayerSpec spec;
//   spec.set_name("mlp.up");
//   spec.mutable_magnitude()->set_sparsity(0.5);
//   auto registered = (*client)->Register(spec, LayerContent::Dense(DenseRows::F32(w, m, k)));
//   auto result = (*client)->Matmul("mlp.up", DenseRows::F32(x, n, k));  // result->y is [n, m]
//
// Every call blocks until it is answered, or its deadline passes; errors are those of the wire contract
// (proto/spmm/v1), as client/cpp/status.h describes. UNAVAILABLE means that no server answers at the address.
#ifndef SPMMD_CLIENT_CPP_CLIENT_H_
#define SPMMD_CLIENT_CPP_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/cpp/layer_content.h"
#include "client/cpp/options.h"
#include "client/cpp/program.h"
#include "client/cpp/ring.h"
#include "client/cpp/shared_memory.h"
#include "client/cpp/status.h"
#include "client/cpp/stream.h"
#include "client/cpp/tensor.h"
#include "grpcpp/channel.h"
#include "spmm/v1/layer_catalog.pb.h"
#include "spmm/v1/sparse_matmul.pb.h"

namespace spmmd::client {

// How far a registration is.
struct RegisterProgress {
  // UPLOADING, then PACKING.
  v1::LayerState state = v1::LAYER_STATE_UPLOADING;
  // Bytes handed to the transport, bytes that the server says it has, and bytes to send in all (0 when the server has
  // the content already or reads it from a file).
  uint64_t sent_bytes = 0;
  uint64_t received_bytes = 0;
  uint64_t total_bytes = 0;
};

// Runs on the thread that called Register. Returning false cancels the registration, which then leaves nothing behind.
using ProgressCallback = std::function<bool(const RegisterProgress&)>;

struct RegisterOptions {
  CallOptions call{};
  ProgressCallback progress{};
};

struct RegisterResult {
  v1::Layer layer;
  // False when the server had the content already, and none was sent.
  bool uploaded = false;
  uint64_t uploaded_bytes = 0;
};

struct MatmulOptions {
  CallOptions call{};
  v1::Activation activation = v1::ACTIVATION_UNSPECIFIED;
  // |x| <= this counts as zero and its column is skipped (SpMspV). Unset takes the layer's own default.
  std::optional<float> activation_threshold{};
  bool ignore_bias = false;
  // Version of the layer; 0 takes the newest.
  int64_t version = 0;
  // Element type of the output.
  v1::DataType output_dtype = v1::DATA_TYPE_F32;
};

struct MatmulResult {
  Matrix y;
  v1::ExecuteTiming timing;
};

// Thread-safe. Cheap calls share one HTTP/2 connection; make several Clients for more bandwidth than one gives.
class Client {
 public:
  // Does not wait for the server: a wrong address shows in the first call. INVALID_ARGUMENT for an address without
  // port, for files that cannot be read, and for options that contradict each other.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(std::string_view address, const ClientOptions& options = {});
  // On a channel made elsewhere, for instance in-process. Uses only timeout, token and chunk_bytes of the options.
  static std::unique_ptr<Client> FromChannel(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options = {});

  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // --- Catalog: what is served.

  // Registers `content` under spec.name. Shape, type, encoding, nnz, bias flag and content hash are filled in from the
  // content (a hash in the spec is kept), so that content the server knows is not sent again.
  absl::StatusOr<RegisterResult> Register(const v1::LayerSpec& spec, const LayerContent& content,
                                          const RegisterOptions& options = {});
  // Registers a tensor of a file in the server's model repository: spec.file must be set.
  absl::StatusOr<RegisterResult> RegisterFile(const v1::LayerSpec& spec, const RegisterOptions& options = {});
  // All layers whose names start with `name_prefix`; pages are fetched until there are no more.
  absl::StatusOr<std::vector<v1::Layer>> List(std::string_view name_prefix = "", const CallOptions& call = {});
  absl::StatusOr<v1::Layer> Get(const v1::LayerRef& layer, const CallOptions& call = {});
  // Version 0 removes every version.
  absl::StatusOr<v1::UnregisterLayerResponse> Unregister(const v1::LayerRef& layer, const CallOptions& call = {});
  absl::StatusOr<v1::Layer> Pin(const v1::LayerRef& layer, bool pinned, const CallOptions& call = {});
  absl::StatusOr<v1::Layer> Warm(const v1::LayerRef& layer, const CallOptions& call = {});
  // No deadline by default.
  absl::StatusOr<std::vector<v1::LayerSpeed>> Benchmark(const v1::BenchmarkRequest& request,
                                                        const CallOptions& call = {});

  // --- Data: multiplying.

  // activation(x * W^T + bias) with one layer.
  absl::StatusOr<MatmulResult> Matmul(std::string_view layer, const DenseRows& x, const MatmulOptions& options = {});
  absl::StatusOr<MatmulResult> Matmul(std::string_view layer, const SparseRows& x, const MatmulOptions& options = {});

  // Any request; see ProgramBuilder, MakeInput and TakeOutput.
  absl::StatusOr<v1::ExecuteResponse> Execute(const v1::ExecuteRequest& request, const CallOptions& call = {});
  // `program` over dense inputs, by name.
  absl::StatusOr<v1::ExecuteResponse> Execute(const v1::Program& program,
                                              absl::Span<const std::pair<std::string_view, DenseRows>> inputs,
                                              const CallOptions& call = {});

  // Has the server check and plan a program once; the id goes into ExecuteRequest.program_id.
  absl::StatusOr<std::string> RegisterProgram(const v1::Program& program, const CallOptions& call = {});
  absl::Status UnregisterProgram(std::string_view program_id, const CallOptions& call = {});

  // The timeout counts for the whole stream; none by default. The stream must not outlive the client.
  absl::StatusOr<std::unique_ptr<Stream>> OpenStream(const CallOptions& call = {});

  // --- Shared memory, for clients on the server's host.

  // A region of `bytes` that requests may name instead of carrying bytes. FAILED_PRECONDITION when the server does not
  // allow it or is on another host; NOT_FOUND when it sees another /dev/shm (a container).
  absl::StatusOr<std::unique_ptr<SharedRegion>> CreateRegion(uint64_t bytes, const CallOptions& call = {});
  // A ring, in a region of its own, for registered programs.
  absl::StatusOr<std::unique_ptr<Ring>> OpenRing(const RingOptions& options, const CallOptions& call = {});

  // --- Server.

  absl::StatusOr<v1::ServerInfoResponse> ServerInfo(const CallOptions& call = {});
  absl::StatusOr<std::vector<v1::Device>> DeviceInfo(const CallOptions& call = {});
  // grpc.health.v1: OK when `service` ("" is the whole server) is serving, UNAVAILABLE when it is not, NOT_FOUND when
  // the server does not know the service.
  absl::Status CheckHealth(std::string_view service = "", const CallOptions& call = {});
  // Waits until the server is reachable and healthy. DEADLINE_EXCEEDED with the last reason.
  absl::Status WaitUntilHealthy(absl::Duration timeout);

 private:
  struct State;
  explicit Client(std::unique_ptr<State> state);
  absl::StatusOr<RegisterResult> Upload(const v1::LayerSpec& spec, const LayerContent* content,
                                        const RegisterOptions& options);
  absl::StatusOr<MatmulResult> MatmulInput(std::string_view layer, absl::StatusOr<v1::NamedInput> input,
                                           const MatmulOptions& options);

  std::unique_ptr<State> state_;
};

}  // namespace spmmd::client

#endif  // SPMMD_CLIENT_CPP_CLIENT_H_
