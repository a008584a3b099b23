#include "server/rpc/connections.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/errors.h"
#include "server/log/log.h"

namespace spmmd::server {
namespace {

constexpr absl::Duration kWatchInterval = absl::Seconds(1);

}  // namespace

Connections::~Connections() {
  Shutdown();
  if (watcher_.joinable()) watcher_.join();
}

const void* Connections::KeyOf(const grpc::AuthContext& properties) {
  auto first = properties.begin();
  return first == properties.end() ? nullptr : static_cast<const void*>((*first).second.data());
}

Connections::Entry& Connections::EntryOf(const grpc::ServerContextBase& context) {
  std::shared_ptr<const grpc::AuthContext> properties = context.auth_context();
  Entry& entry = entries_[KeyOf(*properties)];
  if (entry.properties == nullptr) entry.properties = std::move(properties);
  return entry;
}

absl::StatusOr<std::shared_ptr<Connections::Owned>> Connections::Of(const grpc::ServerContextBase& context) {
  if (!pool_.options().enabled) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kSharedMemoryOff,
                     "this server does not take shared memory; it would with --shared-memory");
  }
  const std::string peer = context.peer();
  const std::shared_ptr<const grpc::AuthContext> properties = context.auth_context();
  if (!IsLocalPeer(peer) || properties == nullptr || KeyOf(*properties) == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, reason::kNotLocal,
                     absl::StrCat("shared memory is for callers on this host, over a Unix socket or a loopback "
                                  "address; this call comes from ",
                                  peer));
  }
  LocalSockets::Candidates sockets;
  {
    absl::MutexLock lock(&mutex_);
    const auto known = entries_.find(KeyOf(*properties));
    if (known != entries_.end() && known->second.owned != nullptr) return known->second.owned;
  }
  sockets = LocalSockets::Of(peer);
  absl::MutexLock lock(&mutex_);
  if (stopping_) {
    return MakeError(absl::StatusCode::kUnavailable, reason::kDraining, "the server is shutting down");
  }
  Entry& entry = EntryOf(context);
  if (entry.owned == nullptr) {
    entry.owned = std::make_shared<Owned>(&pool_);
    entry.sockets = std::move(sockets);
    owners_.fetch_add(1);
    if (!watcher_.joinable()) watcher_ = std::thread([this] { Watch(); });
  }
  return entry.owned;
}

std::shared_ptr<Connections::Owned> Connections::Find(const grpc::ServerContextBase& context) {
  if (owners_.load(std::memory_order_acquire) == 0) return nullptr;
  const std::shared_ptr<const grpc::AuthContext> properties = context.auth_context();
  if (properties == nullptr) return nullptr;
  absl::MutexLock lock(&mutex_);
  const auto known = entries_.find(KeyOf(*properties));
  return known == entries_.end() ? nullptr : known->second.owned;
}

std::unique_ptr<Connections::Stream> Connections::StreamBegan(const grpc::ServerContextBase& context) {
  if (!pool_.options().enabled) return nullptr;
  const std::shared_ptr<const grpc::AuthContext> properties = context.auth_context();
  if (properties == nullptr || KeyOf(*properties) == nullptr) return nullptr;
  absl::MutexLock lock(&mutex_);
  ++EntryOf(context).streams;
  return std::make_unique<Stream>(this, KeyOf(*properties));
}

void Connections::StreamEnded(const void* key, bool cancelled) {
  std::shared_ptr<Owned> owned;
  {
    absl::MutexLock lock(&mutex_);
    const auto known = entries_.find(key);
    if (known == entries_.end()) return;
    Entry& entry = known->second;
    if (--entry.streams > 0) return;
    // An orderly end of the last stream says nothing of the connection: the watcher will see.
    if (entry.owned != nullptr && !cancelled) return;
    owned = std::move(entry.owned);
    if (owned != nullptr) owners_.fetch_sub(1);
    entries_.erase(known);
  }
  if (owned != nullptr) End(owned);
}

void Connections::End(const std::shared_ptr<Owned>& owned) {
  absl::flat_hash_map<std::string, std::shared_ptr<Ring>> rings;
  {
    absl::MutexLock lock(&owned->mutex);
    owned->ended = true;
    rings.swap(owned->rings);
  }
  for (const auto& [id, ring] : rings) ring->Close(/*cancel=*/true);
  const int regions = owned->regions.UnregisterAll();
  if (regions > 0 || !rings.empty()) {
    LogInfo("connection ended", {{"regions", regions}, {"rings", rings.size()}});
  }
}

void Connections::Watch() {
  while (true) {
    std::vector<std::pair<const void*, LocalSockets::Candidates>> unwatched;
    {
      absl::MutexLock lock(&mutex_);
      const absl::Time until = absl::Now() + kWatchInterval;
      mutex_.AwaitWithDeadline(absl::Condition(&stopping_), until);
      if (stopping_) return;
      for (const auto& [key, entry] : entries_) {
        if (entry.streams == 0 && entry.owned != nullptr) unwatched.emplace_back(key, entry.sockets);
      }
    }
    for (auto& [key, sockets] : unwatched) {
      const bool gone = LocalSockets::Gone(&sockets);
      std::shared_ptr<Owned> owned;
      {
        absl::MutexLock lock(&mutex_);
        const auto known = entries_.find(key);
        if (known == entries_.end() || known->second.owned == nullptr) continue;
        known->second.sockets = sockets;
        if (!gone || known->second.streams > 0) continue;
        owned = std::move(known->second.owned);
        owners_.fetch_sub(1);
        entries_.erase(known);
      }
      End(owned);
    }
  }
}

void Connections::Shutdown() {
  std::vector<std::shared_ptr<Owned>> all;
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
    for (auto& [key, entry] : entries_) {
      if (entry.owned != nullptr) all.push_back(std::move(entry.owned));
      entry.owned = nullptr;
    }
    owners_.store(0);
  }
  for (const auto& owned : all) End(owned);
}

}  // namespace spmmd::server
