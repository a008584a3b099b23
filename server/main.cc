// spmmd: see server/README.md.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/app.h"
#include "server/config/options.h"
#include "server/device/host_memory.h"
#include "server/log/log.h"
#include "server/rpc/server.h"
#include "server/version.h"

namespace spmmd::server {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// Leaves without running destructors: gRPC's poller can hold up a normal exit for ten seconds, and there is nothing
// left to save.
[[noreturn]] void Leave(int code) {
  std::cout.flush();
  std::fflush(stdout);
  FlushLog();
  std::_Exit(code);
}

[[noreturn]] void Fail(int code, const std::string& message) {
  std::fprintf(stderr, "spmmd: %s\n", message.c_str());
  Leave(code);
}

int signal_pipe[2] = {-1, -1};

// Async-signal-safe: passes the signal on to the thread that waits for it.
void PassOnSignal(int signal) {
  const int saved_errno = errno;
  const auto byte = static_cast<unsigned char>(signal);
  [[maybe_unused]] const ssize_t written = write(signal_pipe[1], &byte, 1);
  errno = saved_errno;
}

// SIGTERM and SIGINT: while the server starts, the end; the first one later, a drain; the second one, the end at once.
// A handler and not sigwait with the signals blocked: OpenBLAS starts threads before main() does, with nothing blocked,
// and a signal that the kernel delivers to one of those would end the process.
class Signals {
 public:
  Signals() {
    if (pipe2(signal_pipe, O_CLOEXEC) != 0) Fail(kExitFailure, "pipe2 failed");
    struct sigaction action = {};
    action.sa_handler = PassOnSignal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(SIGTERM, &action, nullptr);
    sigaction(SIGINT, &action, nullptr);
    std::signal(SIGPIPE, SIG_IGN);
    std::thread([this] { Loop(); }).detach();
  }

  // From here on a signal means a drain.
  void Serving() { serving_.store(true); }
  void Wait() { stop_.WaitForNotification(); }
  // As a first signal would. From any thread.
  static void Stop() { PassOnSignal(SIGTERM); }

 private:
  [[noreturn]] void Loop() {
    Next();
    // Nothing is served yet, and layers that are half loaded are nobody's.
    if (!serving_.load()) Leave(EXIT_SUCCESS);
    stop_.Notify();
    Next();
    LogWarning("second signal: leaving without a drain");
    Leave(kExitFailure);
  }

  static void Next() {
    unsigned char signal = 0;
    while (read(signal_pipe[0], &signal, 1) != 1) {
    }
    LogInfo("signal received", {{"signal", signal}});
  }

  std::atomic<bool> serving_{false};
  absl::Notification stop_;
};

int CheckHealth(const HealthCheck& command) {
  const absl::Status status = ProbeHealth(command.address, command.timeout);
  if (status.ok()) {
    std::printf("SERVING\n");
    return EXIT_SUCCESS;
  }
  std::fprintf(stderr, "spmmd: %s\n", std::string(status.message()).c_str());
  return kExitFailure;
}

LogLevel LevelOf(const std::string& name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

[[noreturn]] void Serve(const Options& options) {
  InitLog(LevelOf(options.log_level), options.log_format == "json" ? LogFormat::kJson : LogFormat::kText);
  auto* const signals = new Signals;  // lives as long as the process: its thread is never joined
  RouteGrpcLog();

  std::function<void()> on_device_failure;
  if (options.exit_on_device_failure) on_device_failure = Signals::Stop;
  auto app = App::Start(options, on_device_failure);
  if (!app.ok()) Fail(kExitFailure, std::string(app.status().message()));
  if (const absl::Status status = (*app)->LoadAndServe(); !status.ok()) {
    Fail(kExitFailure, std::string(status.message()));
  }
  signals->Serving();
  std::printf("%s\n", (*app)->ReadyLine().c_str());
  std::fflush(stdout);
  signals->Wait();
  (*app)->Drain();
  Leave(options.exit_on_device_failure && (*app)->device_failed() ? kExitFailure : EXIT_SUCCESS);
}

int Main(int argc, const char* const* argv) {
  auto command = ParseCommandLine(argc, argv, Version());
  if (!command.ok()) Fail(kExitUsage, std::string(command.status().message()));
  if (const auto* print = std::get_if<PrintAndExit>(&*command)) {
    std::fputs(print->text.c_str(), stdout);
    return EXIT_SUCCESS;
  }
  if (const auto* check = std::get_if<HealthCheck>(&*command)) Leave(CheckHealth(*check));
  Serve(std::get<Options>(*command));
}

}  // namespace
}  // namespace spmmd::server

int main(int argc, char** argv) {
  spmmd::server::KeepFreedBlocks();
  return spmmd::server::Main(argc, argv);
}
