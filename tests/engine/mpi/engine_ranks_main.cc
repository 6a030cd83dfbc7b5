// SPDX-License-Identifier: Apache-2.0
// A model on processes that MPI joins: mpiexec -n 2 engine_mpi_ranks. Every process is a rank and
// must generate the reference's text.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "engine/reference_text.h"
#include "engine/small_engine.h"
#include "fovea/mpi_communicator.h"
#include "fovea/parallel_engine.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

std::unique_ptr<Communicator> world;

EngineOptions options_for(const char* model) {
  EngineOptions options = small_options(model);
  options.max_context = 1024;
  options.max_requests = 8;
  options.max_batch_tokens = 256;
  return options;
}

TEST(ProcessesAsRanks, GenerateTheReferenceText) {
  for (const char* const model : {"llama", "gpt_oss"}) {
    for (const bool share_contexts : {false, true}) {
      const auto engine = load_engine_rank(options_for(model), *world, share_contexts);
      const std::vector<ReferencePrompt> all = read_reference(model);
      std::vector<GenerateRequest> requests;
      for (const ReferencePrompt& prompt : all) requests.push_back(greedy_request(prompt));
      const std::vector<GenerateResult> results = engine->generate(requests);
      for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(results[i].tokens, all[i].greedy) << model;
    }
  }
}

TEST(ProcessesAsRanks, NeedTheSameMemory) {
  EngineOptions options = options_for("llama");
  options.kv_memory_bytes = 0;
  test::expect_invalid("kv_memory_bytes is 0", [&] { load_engine_rank(options, *world, false); });
}

}  // namespace
}  // namespace fovea

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  MPI_Init(&argc, &argv);
  fovea::world = fovea::make_mpi_communicator(MPI_COMM_WORLD);
  const int result = RUN_ALL_TESTS();
  fovea::world.reset();
  MPI_Finalize();
  return result;
}
