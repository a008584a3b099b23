#include "client/cli/commands.h"

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/cli/render.h"
#include "client/cli/weights.h"
#include "google/protobuf/util/time_util.h"
#include "kernels/base/status_macros.h"

namespace spmmd::cli {
namespace {

using ::google::protobuf::util::TimeUtil;

void Print(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void PrintJson(const Json& json) { Print(json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"); }

void PrintLayer(const Session& session, const v1::Layer& layer) {
  session.json ? PrintJson(ToJson(layer)) : Print(LayerText(layer));
}

double Seconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(TimeUtil::DurationToNanoseconds(duration)) * 1e-9;
}

// One line that overwrites itself, ten times a second.
client::ProgressCallback MakeProgress() {
  static constexpr absl::Duration kInterval = absl::Milliseconds(100);
  return [drawn = absl::InfinitePast()](const client::RegisterProgress& progress) mutable {
    const absl::Time now = absl::Now();
    if (now - drawn < kInterval) return true;
    drawn = now;
    if (progress.state == v1::LAYER_STATE_PACKING) {
      std::fputs("\r\033[Kpacking", stderr);
    } else if (progress.total_bytes > 0) {
      absl::FPrintF(stderr, "\r\033[Kuploading %s of %s", FormatBytes(progress.sent_bytes),
                    FormatBytes(progress.total_bytes));
    }
    return true;
  };
}

void PrintRegistered(const Session& session, const client::RegisterResult& result) {
  const v1::Layer& layer = result.layer;
  if (session.json) {
    Json json = ToJson(layer);
    json["uploaded"] = result.uploaded;
    json["uploaded_bytes"] = result.uploaded_bytes;
    PrintJson(json);
    return;
  }
  const double ratio =
      layer.dense_bytes() > 0 ? static_cast<double>(layer.bytes()) / static_cast<double>(layer.dense_bytes()) : 0;
  std::vector<std::string> devices;
  for (const auto& residency : layer.residency()) devices.push_back(residency.device());
  Print(absl::StrFormat("registered %s version %d: [%d, %d] %s, %s zeros, %s %s (%s of dense)%s%s\n", layer.name(),
                        layer.version(), layer.m(), layer.k(), ToString(layer.dtype()), FormatPercent(layer.sparsity()),
                        ToString(layer.format()), FormatBytes(layer.bytes()), FormatPercent(ratio),
                        devices.empty() ? "" : " on ", absl::StrJoin(devices, ", ")));
  if (result.uploaded) {
    Print(absl::StrCat("sent ", FormatBytes(result.uploaded_bytes), "\n"));
  } else {
    Print("sent nothing: the server has the content\n");
  }
}

}  // namespace

client::LayerContent LocalWeights::Content() const {
  auto content = client::LayerContent::Dense(ToRows(w));
  content.SetBias(bias);
  return content;
}

absl::StatusOr<LocalWeights> ReadWeights(const FileAndTensor& file, const std::string& bias) {
  LocalWeights weights;
  SPMMD_ASSIGN_OR_RETURN(weights.w, ReadLayerWeights(file));
  SPMMD_ASSIGN_OR_RETURN(weights.bias, PackedBias(file));
  if (!bias.empty()) {
    SPMMD_ASSIGN_OR_RETURN(weights.bias, ReadBias(bias, file, weights.w.rows()));
  }
  return weights;
}

absl::Status Register(const Session& session, const RegisterArgs& args) {
  client::RegisterOptions options;
  options.call = session.call;
  if (session.progress) options.progress = MakeProgress();
  SPMMD_ASSIGN_OR_RETURN(const FileAndTensor file, ParseFile(args.file));
  absl::StatusOr<client::RegisterResult> result;
  if (args.remote) {
    v1::LayerSpec spec = args.spec;
    spec.mutable_file()->set_path(file.path);
    spec.mutable_file()->set_tensor(file.tensor);
    spec.mutable_file()->set_bias_tensor(args.bias);
    result = session.shards != nullptr ? session.shards->RegisterFile(spec, options)
                                       : session.client->RegisterFile(spec, options);
  } else {
    SPMMD_ASSIGN_OR_RETURN(const LocalWeights weights, ReadWeights(file, args.bias));
    result = session.shards != nullptr ? session.shards->Register(args.spec, weights.Content(), options)
                                       : session.client->Register(args.spec, weights.Content(), options);
  }
  if (session.progress) std::fputs("\r\033[K", stderr);
  if (!result.ok()) return result.status();
  PrintRegistered(session, *result);
  return absl::OkStatus();
}

absl::Status List(const Session& session, const std::string& prefix) {
  SPMMD_ASSIGN_OR_RETURN(const std::vector<v1::Layer> layers, session.shards != nullptr
                                                                  ? session.shards->List(prefix, session.call)
                                                                  : session.client->List(prefix, session.call));
  if (session.json) {
    Json list = Json::array();
    for (const auto& layer : layers) list.push_back(ToJson(layer));
    PrintJson({{"layers", list}});
  } else if (layers.empty()) {
    Print("no layers\n");
  } else {
    Print(LayerTable(layers));
  }
  return absl::OkStatus();
}

absl::Status Describe(const Session& session, const v1::LayerRef& layer) {
  SPMMD_ASSIGN_OR_RETURN(const v1::Layer found, session.Of(layer.name()).Get(layer, session.call));
  PrintLayer(session, found);
  return absl::OkStatus();
}

absl::Status Run(const Session& session, const RunArgs& args) {
  SPMMD_ASSIGN_OR_RETURN(const FileAndTensor file, ParseFile(args.input));
  SPMMD_ASSIGN_OR_RETURN(const DenseMatrix x, ReadMatrix(file));
  client::MatmulOptions options = args.matmul;
  options.call = session.call;
  options.version = args.layer.version();
  const absl::Time start = absl::Now();
  SPMMD_ASSIGN_OR_RETURN(const client::MatmulResult result,
                         session.Of(args.layer.name()).Matmul(args.layer.name(), ToRows(x), options));
  const double latency = absl::ToDoubleSeconds(absl::Now() - start);
  SPMMD_RETURN_IF_ERROR(WriteMatrix(args.output, result.y));
  const double queue = Seconds(result.timing.queue());
  const double kernel = Seconds(result.timing.kernel());
  const double total = Seconds(result.timing.total());
  if (session.json) {
    PrintJson({{"layer", args.layer.name()},
               {"n", result.y.rows},
               {"k", x.cols()},
               {"m", result.y.cols},
               {"input_dtype", std::string(Name(x.dtype()))},
               {"output_dtype", ToString(result.y.dtype)},
               {"output", args.output},
               {"latency_seconds", latency},
               {"queue_seconds", queue},
               {"kernel_seconds", kernel},
               {"server_seconds", total}});
  } else {
    Print(absl::StrFormat("%s: [%d, %d] %s -> [%d, %d] %s in %s (server %s, queue %s, kernels %s)\nwrote %s\n",
                          args.layer.name(), x.rows(), x.cols(), std::string(Name(x.dtype())), result.y.rows,
                          result.y.cols, ToString(result.y.dtype), FormatSeconds(latency), FormatSeconds(total),
                          FormatSeconds(queue), FormatSeconds(kernel), args.output));
  }
  return absl::OkStatus();
}

absl::Status Bench(const Session& session, const v1::BenchmarkRequest& request) {
  SPMMD_ASSIGN_OR_RETURN(const std::vector<v1::LayerSpeed> speeds,
                         session.Of(request.layer().name()).Benchmark(request, session.call));
  if (session.json) {
    Json list = Json::array();
    for (const auto& speed : speeds) list.push_back(ToJson(speed));
    PrintJson({{"layer", request.layer().name()}, {"speeds", list}});
  } else {
    Print(SpeedTable(speeds));
  }
  return absl::OkStatus();
}

absl::Status Unregister(const Session& session, const v1::LayerRef& layer) {
  SPMMD_ASSIGN_OR_RETURN(const v1::UnregisterLayerResponse removed,
                         session.shards != nullptr ? session.shards->Unregister(layer, session.call)
                                                   : session.client->Unregister(layer, session.call));
  if (session.json) {
    PrintJson({{"name", layer.name()},
               {"removed_versions", removed.removed_versions()},
               {"freed_bytes", removed.freed_bytes()}});
  } else {
    Print(absl::StrFormat("unregistered %s: %d version%s, %s freed\n", layer.name(), removed.removed_versions(),
                          removed.removed_versions() == 1 ? "" : "s", FormatBytes(removed.freed_bytes())));
  }
  return absl::OkStatus();
}

absl::Status Pin(const Session& session, const v1::LayerRef& layer, bool pinned) {
  SPMMD_ASSIGN_OR_RETURN(const v1::Layer changed, session.shards != nullptr
                                                      ? session.shards->Pin(layer, pinned, session.call)
                                                      : session.client->Pin(layer, pinned, session.call));
  PrintLayer(session, changed);
  return absl::OkStatus();
}

absl::Status Warm(const Session& session, const v1::LayerRef& layer) {
  SPMMD_ASSIGN_OR_RETURN(const v1::Layer warmed, session.shards != nullptr ? session.shards->Warm(layer, session.call)
                                                                           : session.client->Warm(layer, session.call));
  PrintLayer(session, warmed);
  return absl::OkStatus();
}

namespace {

absl::Status StatusOfOne(client::Client& client, const Session& session, const std::string& address,
                         absl::Duration wait, Json* json) {
  absl::Status health =
      wait > absl::ZeroDuration() ? client.WaitUntilHealthy(wait) : client.CheckHealth("", session.call);
  absl::StatusOr<v1::ServerInfoResponse> info = client.ServerInfo(session.call);
  // A server that cannot be reached has nothing to show, and this error says why better than a wait that ran out.
  if (!info.ok()) return info.status();
  SPMMD_ASSIGN_OR_RETURN(const std::vector<v1::Device> devices, client.DeviceInfo(session.call));
  if (json != nullptr) {
    Json list = Json::array();
    for (const auto& device : devices) list.push_back(ToJson(device));
    *json = {{"address", address}, {"healthy", health.ok()}, {"server", ToJson(*info)}, {"devices", list}};
    return health;
  }
  std::vector<std::string> formats;
  for (const int format : info->formats()) formats.push_back(ToString(static_cast<v1::Format>(format)));
  const auto& limits = info->limits();
  Print(absl::StrFormat("spmmd %s%s%s at %s: %s\n", info->version(), info->revision().empty() ? "" : " ",
                        info->revision(), address, health.ok() ? "serving" : "NOT SERVING"));
  if (info->shard_count() > 1) {
    Print(absl::StrFormat("  shard        %d of %d\n", info->shard_index(), info->shard_count()));
  }
  Print(absl::StrFormat("  backend      %s\n", info->backend()));
  Print(absl::StrFormat("  formats      %s\n", absl::StrJoin(formats, ", ")));
  Print(absl::StrFormat("  extensions   %s\n",
                        info->extensions().empty() ? "none" : absl::StrJoin(info->extensions(), ", ")));
  Print(absl::StrFormat("  limits       %d tokens a request, %d a batch, %d requests or %s queued, messages of %s\n",
                        limits.max_tokens(), limits.max_batch_tokens(), limits.max_queue_depth(),
                        FormatBytes(limits.max_queue_bytes()), FormatBytes(limits.max_message_bytes())));
  Print("\n" + DeviceTable(devices));
  return health;
}

}  // namespace

absl::Status Status(const Session& session, const std::string& server, absl::Duration wait) {
  if (session.shards == nullptr) {
    Json json;
    absl::Status status = StatusOfOne(*session.client, session, server, wait, session.json ? &json : nullptr);
    if (!json.is_null()) PrintJson(json);
    return status;
  }
  absl::Status result;
  Json shards = Json::array();
  for (int shard = 0; shard < session.shards->count(); ++shard) {
    Json list = Json::array();
    absl::StatusOr<std::vector<client::Replica>> replicas = session.shards->Replicas(shard);
    result.Update(replicas.status());
    if (!replicas.ok()) replicas.emplace();
    for (const client::Replica& replica : *replicas) {
      Json json;
      const absl::Status status =
          StatusOfOne(*replica.client, session, replica.address, wait, session.json ? &json : nullptr);
      if (!status.ok()) {
        result.Update(absl::Status(
            status.code(), absl::StrCat("shard ", shard, ", ", replica.address, ": ", std::string(status.message()))));
      }
      if (session.json) {
        if (json.is_null()) json = {{"address", replica.address}, {"healthy", false}};
        list.push_back(json);
      } else if (!status.ok()) {
        Print(absl::StrCat(replica.address, ": ", std::string(status.message()), "\n"));
      }
    }
    shards.push_back({{"shard", shard}, {"replicas", list}});
  }
  if (session.json) PrintJson({{"shards", shards}});
  return result;
}

}  // namespace spmmd::cli
