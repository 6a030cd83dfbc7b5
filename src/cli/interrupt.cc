// SPDX-License-Identifier: Apache-2.0
#include "cli/interrupt.h"

#include <array>
#include <csignal>
#include <cstdlib>

#include "cli/commands.h"

namespace fovea::cli {
namespace {

constexpr std::array<int, 2> kSignals = {SIGINT, SIGTERM};
volatile std::sig_atomic_t caught_signal = 0;

void remember(int signal) { caught_signal = signal; }

bool ignored(int signal) {
  struct sigaction now {};
  return sigaction(signal, nullptr, &now) == 0 && now.sa_handler == SIG_IGN;
}

}  // namespace

InterruptCatcher::InterruptCatcher() {
  caught_signal = 0;
  struct sigaction action {};
  action.sa_handler = remember;
  // SA_RESTART lets a write in progress complete.
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
  for (const int signal : kSignals) {
    if (!ignored(signal)) sigaction(signal, &action, nullptr);
  }
}

InterruptCatcher::~InterruptCatcher() {
  for (const int signal : kSignals) {
    if (!ignored(signal)) std::signal(signal, SIG_DFL);
  }
}

int InterruptCatcher::caught() { return caught_signal; }

void end_if_interrupted() {
  const int signal = InterruptCatcher::caught();
  if (signal == 0) return;
  flush_stdout();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
  std::_Exit(128 + signal);  // reached if the signal is blocked
}

}  // namespace fovea::cli
