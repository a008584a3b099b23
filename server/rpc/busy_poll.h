// Busy polling: gRPC's thread looks for the next message for a while before it sleeps.
//
// Waking a sleeping thread costs 30 to 60 us on a virtual machine, several times a decode kernel. gRPC has no setting
// for it, so busy_poll.cc replaces epoll_wait for the process that links it (gRPC has one thread at a time in there).
#ifndef SPMMD_SERVER_RPC_BUSY_POLL_H_
#define SPMMD_SERVER_RPC_BUSY_POLL_H_

#include "absl/time/time.h"

namespace spmmd::server {

// From here on a wait for events looks for up to `window` before it sleeps, while that pays: while the events of the
// last wait came within the window. One fruitless look ends it, so that an idle process stays idle. Zero: never looks,
// as before the first call. Any thread.
void SetBusyPoll(absl::Duration window);

}  // namespace spmmd::server

#endif  // SPMMD_SERVER_RPC_BUSY_POLL_H_
