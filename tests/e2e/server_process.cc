#include "tests/e2e/server_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace spmmd::e2e {
namespace {

// For hosts that do much else.
constexpr absl::Duration kPatience = absl::Minutes(3);

}  // namespace

ServerProcess::ServerProcess(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {SPMMD_BINARY};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::array<int, 2> out{};
  std::array<int, 2> err{};
  if (pipe2(out.data(), O_CLOEXEC) != 0 || pipe2(err.data(), O_CLOEXEC) != 0) std::abort();
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(out[1], STDOUT_FILENO);
    dup2(err[1], STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(out[1]);
  close(err[1]);
  out_reader_ = std::thread([this, fd = out[0]] { Collect(fd, &out_); });
  err_reader_ = std::thread([this, fd = err[0]] { Collect(fd, &err_); });
}

ServerProcess::~ServerProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  out_reader_.join();
  err_reader_.join();
}

void ServerProcess::Collect(int fd, std::string* to) {
  std::array<char, 4096> buffer{};
  for (ssize_t got = 0; (got = read(fd, buffer.data(), buffer.size())) > 0;) {
    absl::MutexLock lock(&mutex_);
    to->append(buffer.data(), static_cast<size_t>(got));
  }
  close(fd);
  absl::MutexLock lock(&mutex_);
  --open_;
}

bool ServerProcess::Eventually(const std::function<bool()>& condition) const {
  const absl::Time deadline = absl::Now() + kPatience;
  while (absl::Now() < deadline) {
    if (condition()) return true;
    {
      absl::MutexLock lock(&mutex_);
      if (open_ == 0) break;
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return condition();
}

bool ServerProcess::WaitReady() {
  return Eventually([&] {
    const std::string text = out();
    return text.find("spmmd ready ") != std::string::npos && text.back() == '\n';
  });
}

bool ServerProcess::WaitErr(const std::string& text) const {
  return Eventually([&] { return err().find(text) != std::string::npos; });
}

std::string ServerProcess::Field(const std::string& name) const {
  const std::string text = out();
  const size_t at = text.find(" " + name + "=");
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 2;
  return text.substr(begin, text.find_first_of(" \n", begin) - begin);
}

void ServerProcess::Signal(int signal) const { kill(pid_, signal); }

int ServerProcess::WaitExit() {
  const absl::Time deadline = absl::Now() + kPatience;
  while (absl::Now() < deadline) {
    const pid_t ended = waitpid(pid_, &status_, WNOHANG);
    if (ended == pid_) {
      pid_ = -1;
      // What it wrote last is still on its way through the pipes.
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(
                                  +[](int* open) { return *open == 0; }, &open_),
                              absl::Seconds(10));
      return WIFEXITED(status_) ? WEXITSTATUS(status_) : 128 + WTERMSIG(status_);
    }
    absl::SleepFor(absl::Milliseconds(5));
  }
  return -1;
}

std::string ServerProcess::out() const {
  absl::MutexLock lock(&mutex_);
  return out_;
}

std::string ServerProcess::err() const {
  absl::MutexLock lock(&mutex_);
  return err_;
}

std::string Scrape(const std::string& address) {
  const size_t colon = address.rfind(':');
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(std::atoi(address.c_str() + colon + 1)));
  if (inet_pton(AF_INET, address.substr(0, colon).c_str(), &to.sin_addr) != 1) return "";
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  std::string reply;
  if (connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0) {
    const std::string request = "GET /metrics HTTP/1.0\r\nHost: " + address + "\r\n\r\n";
    (void)!send(fd, request.data(), request.size(), MSG_NOSIGNAL);
    std::array<char, 65536> buffer{};
    for (ssize_t got = 0; (got = recv(fd, buffer.data(), buffer.size(), 0)) > 0;) {
      reply.append(buffer.data(), static_cast<size_t>(got));
    }
  }
  close(fd);
  const size_t body = reply.find("\r\n\r\n");
  return body == std::string::npos ? "" : reply.substr(body + 4);
}

}  // namespace spmmd::e2e
