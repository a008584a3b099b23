#include "client/cli/shards.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/render.h"
#include "google/protobuf/io/tokenizer.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/base/status_macros.h"
#include "proto/shard/shard.h"
#include "spmm/config/v1/config.pb.h"

namespace spmmd::cli {
namespace {

void Print(const std::string& text) { std::fwrite(text.data(), 1, text.size(), stdout); }

// What protobuf's text parser finds wrong, with line and column from 1.
class FirstError final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (text.empty()) text = absl::StrCat(line + 1, ":", column + 1, ": ", message);
  }
  std::string text;
};

// Whose layers these are: one server with all, or one replica of a shard.
struct Server {
  int shard = 0;
  std::string address;
  client::Client* client = nullptr;
  std::map<std::string, v1::Layer> layers;  // the newest version of each name
};

// What was done, or is to be done, about one layer on one server.
struct Action {
  const char* what;  // "register", "keep", "remove"
  std::string layer;
  const Server* server;
};

class Applier {
 public:
  Applier(const Session& session, const ApplyArgs& args) : session_(session), args_(args) {}

  absl::Status Connect(const std::string& server) {
    if (session_.shards == nullptr) {
      servers_.push_back({0, server, session_.client, {}});
    } else {
      for (int shard = 0; shard < session_.shards->count(); ++shard) {
        SPMMD_ASSIGN_OR_RETURN(std::vector<client::Replica> replicas, session_.shards->Replicas(shard));
        for (client::Replica& replica : replicas) {
          servers_.push_back({shard, replica.address, replica.client.get(), {}});
          connections_.push_back(std::move(replica.client));
        }
      }
    }
    for (Server& one : servers_) {
      absl::StatusOr<std::vector<v1::Layer>> layers = one.client->List("", session_.call);
      if (!layers.ok()) return At(one, layers.status());
      for (v1::Layer& layer : *layers) one.layers.try_emplace(layer.name(), std::move(layer));  // newest first
    }
    return absl::OkStatus();
  }

  // Registers a layer where it is missing. Local weights are read once, for all who need them.
  void Place(const v1::LayerSpec& spec, const std::filesystem::path& folder) {
    absl::StatusOr<LocalWeights> weights;
    v1::LayerSpec described = spec;
    if (!args_.remote) {
      weights = ReadWeights({.path = (folder / spec.file().path()).string(),
                             .tensor = spec.file().tensor(),
                             .is_npy = absl::EndsWith(spec.file().path(), ".npy"),
                             .is_packed = absl::EndsWith(spec.file().path(), kPackedExtension)},
                            spec.file().bias_tensor());
      if (!weights.ok()) {
        result_.Update(weights.status());
        return;
      }
      described.clear_file();
      described.set_content_xxh3(weights->Content().Xxh3());
    }
    for (const Server& server : servers_) {
      if (server.shard != ShardOf(spec.name())) continue;
      const auto found = server.layers.find(spec.name());
      const bool there = found != server.layers.end() && found->second.state() != v1::LAYER_STATE_FAILED &&
                         (args_.remote || found->second.content_xxh3() == described.content_xxh3());
      Report({there ? "keep" : "register", spec.name(), &server});
      if (there || args_.dry_run) continue;
      const client::RegisterOptions options{session_.call, {}};
      const absl::Status status = args_.remote
                                      ? server.client->RegisterFile(described, options).status()
                                      : server.client->Register(described, weights->Content(), options).status();
      if (!status.ok()) result_.Update(At(server, status));
    }
  }

  void Remove(const std::set<std::string>& names) {
    for (const Server& server : servers_) {
      for (const auto& [name, layer] : server.layers) {
        if (!names.contains(name) || ShardOf(name) == server.shard) continue;
        Report({"remove", name, &server});
        if (args_.dry_run) continue;
        const auto removed = server.client->Unregister(client::MakeLayerRef(name), session_.call);
        if (!removed.ok()) result_.Update(At(server, removed.status()));
      }
    }
  }

  void Finish() {
    if (session_.json) Print(Json{{"actions", actions_}}.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
  }

  const absl::Status& result() const { return result_; }

 private:
  int ShardOf(const std::string& layer) const {
    return session_.shards != nullptr ? session_.shards->ShardOf(layer) : 0;
  }

  static absl::Status At(const Server& server, const absl::Status& status) {
    absl::Status result(status.code(), absl::StrCat(server.address, ": ", std::string(status.message())));
    status.ForEachPayload(
        [&result](absl::string_view url, const absl::Cord& payload) { result.SetPayload(url, payload); });
    return result;
  }

  void Report(const Action& action) {
    if (session_.json) {
      actions_.push_back({{"action", action.what},
                          {"layer", action.layer},
                          {"shard", action.server->shard},
                          {"server", action.server->address}});
      return;
    }
    Print(absl::StrFormat("%-8s  %s on %s%s\n", action.what, action.layer, action.server->address,
                          session_.shards != nullptr ? absl::StrCat(" (shard ", action.server->shard, ")") : ""));
  }

  const Session& session_;
  const ApplyArgs& args_;
  std::vector<std::unique_ptr<client::Client>> connections_;
  std::vector<Server> servers_;
  Json actions_ = Json::array();
  absl::Status result_;
};

}  // namespace

absl::Status Shard(const ShardArgs& args, bool json) {
  Json list = Json::array();
  Table table(args.from > 0 ? std::vector<std::string>{"LAYER", ">SHARD", ">BEFORE"}
                            : std::vector<std::string>{"LAYER", ">SHARD"});
  for (const std::string& layer : args.layers) {
    const int shard = ShardOf(layer, args.count);
    Json entry = {{"layer", layer}, {"shard", shard}};
    std::vector<std::string> row{layer, absl::StrCat(shard)};
    if (args.from > 0) {
      const int before = ShardOf(layer, args.from);
      entry["before"] = before;
      row.push_back(before == shard ? "" : absl::StrCat(before));
    }
    list.push_back(std::move(entry));
    table.AddRow(std::move(row));
  }
  Print(json ? Json{{"layers", list}}.dump(2) + "\n" : table.ToString());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<v1::LayerSpec>> ReadManifest(const std::string& path) {
  errno = 0;
  std::ifstream file(path);
  std::ostringstream text;
  if (file.is_open()) text << file.rdbuf();
  if (!file.is_open() || file.bad()) {
    return absl::NotFoundError(absl::StrCat(path, ": ", errno != 0 ? std::strerror(errno) : "cannot be read"));
  }
  spmm::config::v1::Manifest manifest;
  if (absl::EndsWith(path, ".json")) {
    const auto status = google::protobuf::util::JsonStringToMessage(text.str(), &manifest);
    if (!status.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::string(status.message())));
  } else {
    google::protobuf::TextFormat::Parser parser;
    FirstError error;
    parser.RecordErrorsTo(&error);
    if (!parser.ParseFromString(text.str(), &manifest)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ":", error.text));
    }
  }
  std::set<std::string> names;
  for (int i = 0; i < manifest.layers_size(); ++i) {
    const v1::LayerSpec& layer = manifest.layers(i);
    const std::string at = absl::StrCat(path, ": layers[", i, "].");
    if (layer.name().empty()) return absl::InvalidArgumentError(absl::StrCat(at, "name must be set"));
    if (!layer.has_file()) return absl::InvalidArgumentError(absl::StrCat(at, "file must be set"));
    if (!names.insert(layer.name()).second) {
      return absl::InvalidArgumentError(absl::StrCat(at, "name: '", layer.name(), "' is there twice"));
    }
  }
  return std::vector<v1::LayerSpec>(manifest.layers().begin(), manifest.layers().end());
}

absl::Status Apply(const Session& session, const std::string& server, const ApplyArgs& args) {
  SPMMD_ASSIGN_OR_RETURN(const std::vector<v1::LayerSpec> layers, ReadManifest(args.manifest));
  Applier applier(session, args);
  SPMMD_RETURN_IF_ERROR(applier.Connect(server));
  std::set<std::string> names;
  for (const v1::LayerSpec& layer : layers) {
    applier.Place(layer, std::filesystem::path(args.manifest).parent_path());
    names.insert(layer.name());
  }
  if (args.remove && applier.result().ok()) applier.Remove(names);
  applier.Finish();
  return applier.result();
}

}  // namespace spmmd::cli
