// The real program, run as a child process.
#ifndef SPMMD_TESTS_E2E_SERVER_PROCESS_H_
#define SPMMD_TESTS_E2E_SERVER_PROCESS_H_

#include <sys/types.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace spmmd::e2e {

// Killed, if need be, when the object goes, and when the test program dies.
class ServerProcess {
 public:
  explicit ServerProcess(const std::vector<std::string>& arguments);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  // True when the ready line came; false when the program ended before (or nothing came for minutes).
  bool WaitReady();
  // From the ready line: Field("grpc") is the address.
  std::string Field(const std::string& name) const;

  void Signal(int signal) const;
  // Exit code, or 128 + the signal that ended it; -1 when it does not end for minutes.
  int WaitExit();

  std::string out() const;
  std::string err() const;
  // Waits until stderr has the text; false when the program ended without it.
  bool WaitErr(const std::string& text) const;

 private:
  void Collect(int fd, std::string* to);
  bool Eventually(const std::function<bool()>& condition) const;

  pid_t pid_ = -1;
  int status_ = -1;
  std::thread out_reader_;
  std::thread err_reader_;
  mutable absl::Mutex mutex_;
  std::string out_ ABSL_GUARDED_BY(mutex_);
  std::string err_ ABSL_GUARDED_BY(mutex_);
  int open_ ABSL_GUARDED_BY(mutex_) = 2;
};

// The body of GET /metrics, or empty.
std::string Scrape(const std::string& address);

}  // namespace spmmd::e2e

#endif  // SPMMD_TESTS_E2E_SERVER_PROCESS_H_
