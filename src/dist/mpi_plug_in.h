// SPDX-License-Identifier: Apache-2.0
// The function of the plug-in for MPI, which program and plug-in share.
#pragma once

#include "fovea/communicator.h"

namespace fovea {

// Sets `functions` to those of the processes of MPI_COMM_WORLD; they end with destroy(). Returns
// null, or the problem in words.
using JoinMpi = const char* (*)(CommunicatorFunctions* functions);
inline constexpr const char* kJoinMpi = "fovea_join_mpi_1";

}  // namespace fovea
