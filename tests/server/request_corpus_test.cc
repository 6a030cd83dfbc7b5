// SPDX-License-Identifier: Apache-2.0
// Replays the corpus of the fuzzer of bodies, whole and cut at every byte, and with bytes changed.
#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>

#include "core/mapped_file.h"
#include "fuzz/request_target.h"

namespace fovea {
namespace {

TEST(RequestCorpus, BodiesAreTakenOrRefused) {
  int taken = 0, refused = 0;
  std::mt19937 random(1);
  for (const auto& entry :
       std::filesystem::directory_iterator(FOVEA_SOURCE_DIR "/tests/fuzz/corpus/request")) {
    const MappedFile file(entry.path().string());
    std::string text(file.text());
    const auto dialect = text[0] == 'c' ? server::Dialect::chat : server::Dialect::completions;
    text.erase(0, 1);
    const bool good = fuzz::read_request(dialect, text);
    EXPECT_EQ(good, !entry.path().filename().string().starts_with("bad_")) << entry.path();
    (good ? taken : refused)++;
    const size_t end = text.find_last_of('}');
    for (size_t cut = 0; cut < std::min<size_t>(end, 2000); ++cut)
      EXPECT_FALSE(fuzz::read_request(dialect, text.substr(0, cut))) << entry.path() << " " << cut;
    for (int i = 0; i < 200; ++i) {
      std::string changed = text;
      changed[random() % changed.size()] = static_cast<char>(random() % 256);
      (void)fuzz::read_request(dialect, changed);
    }
  }
  EXPECT_GE(taken, 4);
  EXPECT_GE(refused, 4);
}

}  // namespace
}  // namespace fovea
