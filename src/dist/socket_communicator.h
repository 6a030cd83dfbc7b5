// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes, joined by TCP: each has a connection to rank 0, which passes data on
// and adds in the order of the ranks.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "dist/connection.h"
#include "fovea/communicator.h"

namespace fovea {

// `links` is [ranks] on rank 0, its own one closed, and [1] elsewhere.
std::unique_ptr<Communicator> make_socket_communicator(int rank, int ranks,
                                                       std::vector<Connection> links,
                                                       std::chrono::milliseconds timeout);

}  // namespace fovea
