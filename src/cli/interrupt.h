// SPDX-License-Identifier: Apache-2.0
// Ctrl-C and `kill` for commands whose results so far are worth printing.
#pragma once

namespace fovea::cli {

// While one lives, the first SIGINT or SIGTERM is remembered; a second one of the same kind ends
// the program at once. Signals that the program was started to ignore stay ignored.
class InterruptCatcher {
 public:
  InterruptCatcher();
  ~InterruptCatcher();
  InterruptCatcher(const InterruptCatcher&) = delete;
  InterruptCatcher& operator=(const InterruptCatcher&) = delete;

  static int caught();  // the last signal, 0: none
};

// If one was caught: ends the program as that signal does by default, with what was printed written
// out, so that a shell's loop around it ends too. The shell says 128 + signal.
void end_if_interrupted();

}  // namespace fovea::cli
