// SPDX-License-Identifier: Apache-2.0
// Preloaded into a server: once it listens, it may open no file, start no program and connect to
// nothing. Each attempt ends the process, with its name on stderr.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

std::atomic<bool> listening = false;

template <typename Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

void refuse(const char* what) {
  if (!listening) return;
  constexpr char kBegin[] = "no_outside: ";
  (void)!write(STDERR_FILENO, kBegin, sizeof(kBegin) - 1);
  (void)!write(STDERR_FILENO, what, strlen(what));
  (void)!write(STDERR_FILENO, "\n", 1);
  abort();
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int listen(int socket, int backlog) {
  const int result = real<int(int, int)>("listen")(socket, backlog);
  listening = true;
  return result;
}

int connect(int socket, const sockaddr* address, socklen_t length) {
  refuse("connect");
  return real<int(int, const sockaddr*, socklen_t)>("connect")(socket, address, length);
}

int open(const char* path, int flags, ...) {
  refuse("open");
  return openat(AT_FDCWD, path, flags, 0666);
}

int open64(const char* path, int flags, ...) {
  refuse("open64");
  return openat(AT_FDCWD, path, flags, 0666);
}

FILE* fopen(const char* path, const char* mode) {
  refuse("fopen");
  return real<FILE*(const char*, const char*)>("fopen")(path, mode);
}

FILE* fopen64(const char* path, const char* mode) {
  refuse("fopen64");
  return real<FILE*(const char*, const char*)>("fopen64")(path, mode);
}

int execve(const char* path, char* const arguments[], char* const environment[]) {
  refuse("execve");
  return real<int(const char*, char* const[], char* const[])>("execve")(path, arguments,
                                                                        environment);
}

pid_t fork() {
  refuse("fork");
  return real<pid_t()>("fork")();
}

}  // extern "C"
#pragma GCC visibility pop
