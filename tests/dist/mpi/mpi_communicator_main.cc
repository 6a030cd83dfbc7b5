// SPDX-License-Identifier: Apache-2.0
// The checks of tests/dist over MPI, one process for each rank: mpiexec -n N mpi_communicator.
// With --hang, rank 1 stays away from a barrier, and all others must get an error.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "dist/collective_checks.h"
#include "fovea/error.h"
#include "fovea/mpi_communicator.h"

namespace fovea {
namespace {

using std::chrono::milliseconds;

std::unique_ptr<Communicator> world;

TEST(MpiCommunicator, PassesAllChecks) {
  EXPECT_EQ(world->name(), "mpi");
  test::check_collectives(*world);
}

// MPI may add in any order; these sums have the bits of the order of the ranks.
TEST(MpiCommunicator, SumsAreInTheOrderOfTheRanks) {
  const auto value = [](int rank) {
    return rank % 2 == 0 ? 1e8f : 1.5f + static_cast<float>(rank);
  };
  float expected = value(0);
  for (int rank = 1; rank < world->size(); ++rank) expected += value(rank);
  float sum = value(world->rank());
  world->all_reduce(&sum, &sum, 1, DType::f32, ReduceOp::sum);
  EXPECT_EQ(sum, expected);
}

// Prints a line on success. mpiexec kills all ranks when one ends without MPI_Finalize(), so exit
// codes say nothing.
int check_hanging_rank() {
  const auto ranks = make_mpi_communicator(MPI_COMM_WORLD, milliseconds(500));
  if (ranks->rank() == 1) {
    std::this_thread::sleep_for(milliseconds(2500));
    return 0;
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      ranks->barrier();
      std::fprintf(stderr, "rank %d: no error\n", ranks->rank());
      return 1;
    } catch (const Error& error) {
      if (std::string(error.what()).find("a rank did not come") == std::string::npos) {
        std::fprintf(stderr, "rank %d: %s\n", ranks->rank(), error.what());
        return 1;
      }
    }
  }
  if (std::chrono::steady_clock::now() - begin > milliseconds(2000)) return 1;
  std::printf("rank %d: errors in time\n", ranks->rank());
  std::fflush(stdout);
  std::this_thread::sleep_for(milliseconds(3000));  // rank 1 ends meanwhile
  return 0;
}

}  // namespace
}  // namespace fovea

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  MPI_Init(&argc, &argv);
  if (argc > 1 && std::strcmp(argv[1], "--hang") == 0) {
    std::_Exit(fovea::check_hanging_rank());  // MPI_Finalize() would wait
  }
  fovea::world = fovea::make_mpi_communicator(MPI_COMM_WORLD);
  const int result = RUN_ALL_TESTS();
  fovea::world.reset();
  MPI_Finalize();
  return result;
}
