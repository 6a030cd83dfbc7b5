// SPDX-License-Identifier: Apache-2.0
// Communicators between processes, by which ranks on the CPU communicate and ranks with a GPU each
// find each other: over TCP, or over the MPI of a plug-in.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "fovea/api.h"
#include "fovea/communicator.h"

namespace FOVEA_API fovea {

struct RendezvousOptions {
  // Path of a file that all ranks can see, on a shared file system if they are on several machines.
  std::string file = {};
  int rank = 0, ranks = 1;
  std::chrono::milliseconds meeting_timeout{120'000};  // until all ranks have come
  std::chrono::milliseconds timeout{10'000};  // a call waits for as long; see set_timeout()
};

// Joins processes over TCP. Rank 0 listens and writes its addresses and a random secret into the
// file, which nobody else may read, in one step; the others wait for it, connect and check in with
// the secret. Once all are there, rank 0 removes the file. A file that an earlier run has left is
// replaced by rank 0; until then nobody answers to its secret. All data passes rank 0, unencrypted.
//
// A rank that leaves is noticed at once by those that wait for it, and by check().
//
// Throws Error{invalid_argument} naming the field, Error{io} if the file cannot be written, and
// Error{device_failure} naming the file, the absent rank and the seconds.
std::unique_ptr<Communicator> meet_by_file(const RendezvousOptions& options);

// Returns the number of processes that mpiexec has started together with this one, by the
// environment that MPICH, Open MPI and their relatives set; 0 if it was not started so.
int mpi_process_count();

// Joins the processes that mpiexec has started. `plug_in` is the path of fovea_mpi.so, which was
// built with their MPI; empty: FOVEA_MPI, or the file next to the program. Calls MPI_Init_thread()
// and, with the communicator's end, MPI_Finalize(), unless a rank has failed. Throws
// Error{unsupported} with the reason if there is no such plug-in.
std::unique_ptr<Communicator> meet_by_mpi(const std::string& plug_in = {});

}  // namespace fovea
