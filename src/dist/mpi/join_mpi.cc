// SPDX-License-Identifier: Apache-2.0
// fovea_mpi.so, which alone depends on an MPI: the program loads it when mpiexec has started it.
#include <memory>

#include "dist/mpi_plug_in.h"
#include "fovea/mpi_communicator.h"

namespace fovea {
namespace {

// MPI_Finalize() waits for all ranks, so it is left out after a failure.
void end_mpi(void* context) {
  std::unique_ptr<detail::MpiRanks> ranks(static_cast<detail::MpiRanks*>(context));
  const bool failed = ranks->failed();
  ranks.reset();
  if (!failed) MPI_Finalize();
}

}  // namespace
}  // namespace fovea

extern "C" __attribute__((visibility("default"))) const char* fovea_join_mpi_1(
    fovea::CommunicatorFunctions* functions) {
  int is_initialized = 0, threads = MPI_THREAD_SINGLE;
  MPI_Initialized(&is_initialized);
  if (is_initialized != 0) return "the processes have been joined before";
  if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &threads) != MPI_SUCCESS) {
    return "MPI_Init_thread has failed";
  }
  if (threads < MPI_THREAD_SERIALIZED) return "this MPI does not allow calls from several threads";
  auto ranks =
      std::make_unique<fovea::detail::MpiRanks>(MPI_COMM_WORLD, std::chrono::milliseconds(10'000));
  *functions = fovea::mpi_functions(*ranks);
  functions->destroy = fovea::end_mpi;
  (void)ranks.release();
  return nullptr;
}
