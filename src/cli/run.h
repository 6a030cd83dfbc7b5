// SPDX-License-Identifier: Apache-2.0
// The command line tool as a function, so that `python -m fovea` runs the same code.
#pragma once

namespace fovea::cli {

// Runs the command that the arguments name and returns the exit status of the process. argv[0] is
// not read. Changes how the process treats signals, so call it once, at the end of a program.
int run(int argc, char** argv);

}  // namespace fovea::cli
