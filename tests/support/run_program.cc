// SPDX-License-Identifier: Apache-2.0
#include "support/run_program.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <stdexcept>

namespace fovea::test {
namespace {

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

std::string contents(std::FILE* file) {
  std::string text;
  std::rewind(file);
  char buffer[4096];
  for (size_t n; (n = std::fread(buffer, 1, sizeof(buffer), file)) > 0;) text.append(buffer, n);
  return text;
}

// A running program, from fork to wait.
class Child {
 public:
  explicit Child(const std::vector<std::string>& command) {
    if (!out_ || !err_) throw std::runtime_error("no temporary file");
    std::vector<char*> arguments;
    for (const std::string& argument : command) {
      arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    id_ = fork();
    if (id_ < 0) throw std::runtime_error("fork failed");
    if (id_ == 0) {
      dup2(fileno(out_.get()), STDOUT_FILENO);
      dup2(fileno(err_.get()), STDERR_FILENO);
      signal(SIGINT, SIG_DFL);  // shells ignore it for background jobs
      execv(arguments[0], arguments.data());
      _exit(127);
    }
  }

  void send_when_ready(int signal, size_t bytes) const {
    while (!ended() && !(catches(signal) && printed() >= bytes)) usleep(1000);
    kill(id_, signal);
  }

  ProgramResult wait() const {
    int status = 0;
    rusage usage{};
    if (wait4(id_, &status, 0, &usage) != id_) throw std::runtime_error("wait4 failed");
    ProgramResult result;
    result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result.out = contents(out_.get());
    result.err = contents(err_.get());
    result.peak_rss_bytes = static_cast<size_t>(usage.ru_maxrss) * 1024;
    return result;
  }

 private:
  bool ended() const {  // true also if it was not waited for yet
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(id_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
           info.si_pid == id_;
  }
  bool catches(int signal) const {
    std::ifstream status("/proc/" + std::to_string(id_) + "/status");
    for (std::string line; std::getline(status, line);) {
      if (!line.starts_with("SigCgt:")) continue;
      return (std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1) != 0;
    }
    return false;
  }
  size_t printed() const {
    struct stat status {};
    return fstat(fileno(out_.get()), &status) == 0 ? static_cast<size_t>(status.st_size) : 0;
  }

  // Files instead of pipes, so that a program with much output cannot block.
  const File out_{std::tmpfile()};
  const File err_{std::tmpfile()};
  pid_t id_ = -1;
};

}  // namespace

ProgramResult run_program(const std::vector<std::string>& command) { return Child(command).wait(); }

ProgramResult interrupt_program(const std::vector<std::string>& command, int signal, size_t bytes) {
  const Child child(command);
  child.send_when_ready(signal, bytes);
  return child.wait();
}

}  // namespace fovea::test
