// What a client's connection owns beyond its calls: shared-memory regions and rings, which go away with it.
//
// gRPC tells a server neither which connection a call came on nor when one ends. The connection is told apart by the
// authentication properties that gRPC keeps for each, which have an address of their own as long as they are held here.
// Its end is seen in two ways: at once, when an ExecuteStream that is open on it is cancelled and no other is left (the
// client libraries keep one for this); and, without a stream, within a second or two from the process's sockets.
#ifndef SPMMD_SERVER_RPC_CONNECTIONS_H_
#define SPMMD_SERVER_RPC_CONNECTIONS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "server/ring/ring.h"
#include "server/rpc/local_sockets.h"
#include "server/shm/region.h"

namespace spmmd::server {

class Connections {
 public:
  // `regions` must outlive this object.
  explicit Connections(RegionPool* regions) : pool_(*regions) {}
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // One connection's. Whoever holds it may use it, also after the connection has ended: then it is empty.
  struct Owned {
    explicit Owned(RegionPool* pool) : regions(pool) {}
    RegionSet regions;
    absl::Mutex mutex;
    bool ended ABSL_GUARDED_BY(mutex) = false;
    absl::flat_hash_map<std::string, std::shared_ptr<Ring>> rings ABSL_GUARDED_BY(mutex);
  };

  // Of the connection of a call, made at its first use. FAILED_PRECONDITION (SHARED_MEMORY_OFF, NOT_LOCAL) when shared
  // memory is off, or when the call does not come from this host.
  absl::StatusOr<std::shared_ptr<Owned>> Of(const grpc::ServerContextBase& context);
  // Null when the connection owns nothing. Cheap while nobody does.
  std::shared_ptr<Owned> Find(const grpc::ServerContextBase& context);

  // An ExecuteStream that is open; its destructor is its end. Null when shared memory is off.
  class Stream {
   public:
    Stream(Connections* connections, const void* key) : connections_(*connections), key_(key) {}
    ~Stream() { connections_.StreamEnded(key_, cancelled_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    void set_cancelled() { cancelled_ = true; }

   private:
    Connections& connections_;
    const void* const key_;
    bool cancelled_ = false;
  };
  std::unique_ptr<Stream> StreamBegan(const grpc::ServerContextBase& context);

  // Ends every connection's: nothing new is taken.
  void Shutdown();

 private:
  struct Entry {
    std::shared_ptr<const grpc::AuthContext> properties;  // keeps the key's address from being used again
    int streams = 0;
    std::shared_ptr<Owned> owned;
    LocalSockets::Candidates sockets;  // one of them is the connection's
  };

  static const void* KeyOf(const grpc::AuthContext& properties);
  Entry& EntryOf(const grpc::ServerContextBase& context) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StreamEnded(const void* key, bool cancelled);
  static void End(const std::shared_ptr<Owned>& owned);
  void Watch();

  RegionPool& pool_;
  std::atomic<int> owners_{0};
  absl::Mutex mutex_;
  absl::flat_hash_map<const void*, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread watcher_;  // started with the first owner
};

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_CONNECTIONS_H_
