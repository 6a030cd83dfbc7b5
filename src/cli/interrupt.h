// SPDX-License-Identifier: Apache-2.0
// Handles Ctrl-C and `kill` for commands that print partial results.
#pragma once

namespace fovea::cli {

// While an object lives, it records the first SIGINT or SIGTERM. A second signal of the same kind
// ends the program at once. Signals that were ignored at the start of the program stay ignored.
class InterruptCatcher {
 public:
  InterruptCatcher();
  ~InterruptCatcher();
  InterruptCatcher(const InterruptCatcher&) = delete;
  InterruptCatcher& operator=(const InterruptCatcher&) = delete;

  static int caught();  // the last signal, or 0
};

// If a signal was caught, flushes the output and ends the program by that signal, so that a shell's
// loop ends too. A shell reports the exit code as 128 + signal.
void end_if_interrupted();

}  // namespace fovea::cli
