// The feed-forward block of a Llama-like model, y = down(silu(gate(x)) * up(x)), in one call a batch.
//
//   build/bin/spmmd &
//   build/bin/example_gated_mlp 127.0.0.1:8500
#include <cstdio>
#include <cstdlib>
#include <future>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"

namespace {

namespace v1 = ::spmm::v1;
using ::spmmd::client::Client;
using ::spmmd::client::DenseRows;
using ::spmmd::client::LayerContent;
using ::spmmd::client::MakeInput;
using ::spmmd::client::ProgramBuilder;
using ::spmmd::client::TakeOutput;

constexpr int64_t kHidden = 256;
constexpr int64_t kIntermediate = 768;

std::vector<float> Gaussian(int64_t elements, float deviation, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> values(static_cast<size_t>(elements));
  for (float& value : values) value = normal(generator);
  return values;
}

// The server prunes half of the weights away and stores the rest as fp16.
absl::Status RegisterPruned(Client& client, const std::string& name, int64_t m, int64_t k, int seed) {
  const std::vector<float> w = Gaussian(m * k, 0.05f, seed);
  v1::LayerSpec spec;
  spec.set_name(name);
  spec.set_store_dtype(v1::DATA_TYPE_F16);
  spec.mutable_magnitude()->set_sparsity(0.5);
  const auto result = client.Register(spec, LayerContent::Dense(DenseRows::F32(w, m, k)));
  if (!result.ok()) return result.status();
  const v1::Layer& layer = result->layer;
  std::printf("%-14s %s, %llu bytes instead of %llu%s\n", name.c_str(), v1::Format_Name(layer.format()).c_str(),
              static_cast<unsigned long long>(layer.bytes()), static_cast<unsigned long long>(layer.dense_bytes()),
              result->uploaded ? "" : " (content known, nothing uploaded)");
  return absl::OkStatus();
}

absl::Status Run(const std::string& address) {
  auto connected = Client::Connect(address);
  if (!connected.ok()) return connected.status();
  Client& client = **connected;
  if (absl::Status status = client.WaitUntilHealthy(absl::Seconds(10)); !status.ok()) return status;

  if (absl::Status s = RegisterPruned(client, "example.gate", kIntermediate, kHidden, 1); !s.ok()) return s;
  if (absl::Status s = RegisterPruned(client, "example.up", kIntermediate, kHidden, 2); !s.ok()) return s;
  if (absl::Status s = RegisterPruned(client, "example.down", kHidden, kIntermediate, 3); !s.ok()) return s;

  const v1::Program mlp = ProgramBuilder()
                              .Input("x")
                              .Matmul("gate", "example.gate", "x", {.activation = v1::ACTIVATION_SILU})
                              .Matmul("up", "example.up", "x")
                              .Mul("h", "gate", "up")
                              .Matmul("y", "example.down", "h")
                              .Output("y")
                              .Build();
  auto stream = client.OpenStream();
  if (!stream.ok()) return stream.status();

  // All batches are in flight at once; the server joins what waits for the same layer.
  std::vector<std::future<absl::StatusOr<v1::ExecuteResponse>>> answers;
  for (int batch = 0; batch < 8; ++batch) {
    const int64_t tokens = batch + 1;
    const std::vector<float> x = Gaussian(tokens * kHidden, 1.0f, 100 + batch);
    v1::ExecuteRequest request;
    *request.mutable_program() = mlp;
    auto input = MakeInput("x", DenseRows::F32(x, tokens, kHidden));
    if (!input.ok()) return input.status();
    *request.add_inputs() = *std::move(input);
    answers.push_back((*stream)->Submit(std::move(request)));
  }
  for (auto& answer : answers) {
    absl::StatusOr<v1::ExecuteResponse> response = answer.get();
    if (!response.ok()) return response.status();
    const auto y = TakeOutput(*response, "y");
    if (!y.ok()) return y.status();
    std::printf("[%lld, %lld] first element %+.4f\n", static_cast<long long>(y->rows), static_cast<long long>(y->cols),
                y->As<float>()[0]);
  }
  if (absl::Status status = (*stream)->Close(); !status.ok()) return status;
  for (const char* name : {"example.gate", "example.up", "example.down"}) {
    if (const auto removed = client.Unregister(spmmd::client::MakeLayerRef(name)); !removed.ok()) {
      return removed.status();
    }
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const absl::Status status = Run(argc > 1 ? argv[1] : "127.0.0.1:8500");
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
}
