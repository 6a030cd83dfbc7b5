// SPDX-License-Identifier: Apache-2.0
// Kernel packs, on machines without a GPU or NVRTC.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fovea/error.h"
#include "gpu/kernel_pack.h"
#include "kernels/cuda/kernel_traits.h"
#include "support/expect_error.h"

namespace fovea::gpu {
namespace {

class KernelPackFile : public ::testing::Test {
 protected:
  ~KernelPackFile() override { std::filesystem::remove(path_); }
  void write(const std::string& bytes) const { std::ofstream(path_, std::ios::binary) << bytes; }
  std::string read() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Expects an error that says `what` and names the file. Errors in the file as a whole appear when
  // it is opened; entries that do not decompress appear when they are requested.
  void expect_corrupt(const std::string& bytes, const std::string& what = "") const {
    write(bytes);
    test::expect_error(ErrorCode::corrupt_file, {path_, what},
                       [&] { KernelPack::open(path_).find(one_); });
  }
  // Returns `pack` with `from` in its index replaced.
  static std::string edited(std::string pack, const std::string& from, const std::string& to) {
    EXPECT_NE(pack.find(from), std::string::npos) << from;
    pack.replace(pack.find(from), from.size(), to);
    uint64_t index_bytes = 0;
    std::memcpy(&index_bytes, &pack[8], sizeof(index_bytes));
    index_bytes += to.size() - from.size();
    std::memcpy(&pack[8], &index_bytes, sizeof(index_bytes));
    return pack;
  }

  static size_t end_of_index(const std::string& pack) {
    uint64_t index_bytes = 0;
    std::memcpy(&index_bytes, &pack[8], sizeof(index_bytes));
    return 16 + index_bytes;
  }

  const std::string path_ =
      (std::filesystem::temp_directory_path() / ("fovea_pack_" + std::to_string(getpid())))
          .string();
  const KernelVariant one_{
      .name = "a/1", .program = "text", .symbol = "s", .headers = {}, .sm = 90};
  const KernelVariant two_{
      .name = "a/2", .program = "text", .symbol = "s", .headers = {}, .sm = 80};
};

TEST_F(KernelPackFile, KeepsWhatWasSaved) {
  KernelPack pack;
  pack.set(one_, {.cubin = std::string("\0one", 4), .resources = {.registers = 7}, .seconds = 2});
  pack.set(two_, {.cubin = "second",
                  .resources = {.spill_bytes = 8, .losses = "(C7510) serialized\n(C7511) again"},
                  .seconds = 1});
  pack.save(path_);
  const KernelPack again = KernelPack::open(path_);
  ASSERT_TRUE(again.contains(one_));
  EXPECT_EQ(again.find(one_)->cubin, std::string("\0one", 4));
  EXPECT_EQ(again.find(one_)->resources.registers, 7);
  EXPECT_EQ(again.find(one_)->resources.losses, "");
  EXPECT_EQ(again.find(two_)->resources.spill_bytes, 8);
  EXPECT_EQ(again.find(two_)->resources.losses, "(C7510) serialized\n(C7511) again");
}

// As threads do, and processes of containers that share a cache and have the same process ids.
TEST_F(KernelPackFile, IsWholeAfterConcurrentSaves) {
  KernelPack pack;
  pack.set(one_, {.cubin = std::string(1 << 20, 'x'), .resources = {}, .seconds = 0});
  std::vector<std::string> problems(4);
  std::vector<std::thread> savers;
  for (std::string& problem : problems) {
    savers.emplace_back([&] {
      try {
        for (int i = 0; i < 20; ++i) {
          pack.save(path_);
          KernelPack::open(path_).find(one_);
        }
      } catch (const Error& error) {
        problem = error.what();
      }
    });
  }
  for (std::thread& saver : savers) saver.join();
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
  for (const auto& file :
       std::filesystem::directory_iterator(std::filesystem::temp_directory_path())) {
    EXPECT_FALSE(file.path().string().starts_with(path_ + ".")) << "left " << file.path();
  }
}

TEST_F(KernelPackFile, EntriesOfOtherSourcesAreStale) {
  KernelPack pack;
  pack.set(one_, {.cubin = "one", .resources = {}, .seconds = 0});
  KernelVariant other = one_;
  const auto include = [&](const char* name, const char* text) {
    other.headers = std::make_shared<const Headers>(Headers::Texts{{name, text}});
  };
  include("h", "new");
  EXPECT_FALSE(pack.find(other));
  pack.set(other, {.cubin = "new", .resources = {}, .seconds = 0});
  EXPECT_FALSE(pack.find(one_));
  include("h", "new");
  EXPECT_TRUE(pack.find(other));
  include("hn", "ew");
  EXPECT_FALSE(pack.find(other));
  pack.set(one_, {.cubin = "one", .resources = {}, .seconds = 0});
  other = one_;
  other.sm = 80;
  EXPECT_FALSE(pack.find(other));
  other = one_;
  other.flags.push_back("--use_fast_math");
  EXPECT_FALSE(pack.find(other));
  other.flags.assign(one_.flags.begin() + 1, one_.flags.end());
  EXPECT_FALSE(pack.find(other));
  EXPECT_FALSE(pack.find(two_));
}

TEST_F(KernelPackFile, DamagedFilesAreErrors) {
  KernelPack pack;
  pack.set(one_, {.cubin = "machine code", .resources = {}, .seconds = 0});
  pack.save(path_);
  const std::string good = read();
  expect_corrupt("");
  expect_corrupt("NOTAPACK" + good.substr(8), "not a kernel pack");
  expect_corrupt("FOVEAPK2" + good.substr(8), "version '2', must be '3'");
  expect_corrupt(good.substr(0, 20));
  expect_corrupt(good.substr(0, good.size() - 1));
  std::string longer = good;
  longer[8] = '\xff';
  longer[12] = '\xff';
  expect_corrupt(longer);
}

TEST_F(KernelPackFile, EntriesDoNotShareBytes) {
  KernelPack pack;
  pack.set(one_, {.cubin = "one", .resources = {}, .seconds = 0});
  pack.set(two_, {.cubin = "two", .resources = {}, .seconds = 0});
  pack.save(path_);
  const std::string good = read();
  const size_t both = good.size() - end_of_index(good), each = both / 2;
  expect_corrupt(
      edited(good, "frame_bytes=" + std::to_string(each), "frame_bytes=" + std::to_string(both)),
      "entries up to a/2 have " + std::to_string(both + each) + " bytes, " + std::to_string(both) +
          " are there");
}

TEST_F(KernelPackFile, NumbersOfTheIndexHaveLimits) {
  KernelPack pack;
  pack.set(one_, {.cubin = "machine code", .resources = {.registers = 7}, .seconds = 1});
  pack.save(path_);
  const std::string good = read();
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"registers=7", "registers=-7"},
           {"registers=7", "registers=7.5"},
           {"registers=7", "registers=7 "},
           {"registers=7", "registers="},
           {"registers=7", "registers=2147483647"},
           {"shared_bytes=0", "shared_bytes=-1024"},
           {"spill_bytes=0", "spill_bytes=1e30"},
           {"stack_bytes=0", "stack_bytes=\"0\""},
           {"offset=0", "offset=-1"},
           {"offset=0", "offset=18446744073709551616"},
           {"seconds=1", "seconds=1e300"},
           {"seconds=1", "seconds=-1"},
           {"seconds=1", "seconds=nan"},
       }) {
    SCOPED_TRACE(to);
    expect_corrupt(edited(good, from, to), to.substr(0, to.find('=')));
  }
}

TEST_F(KernelPackFile, LinesOfTheIndexHaveEveryFieldInOrder) {
  KernelPack pack;
  pack.set(one_, {.cubin = "machine code", .resources = {.registers = 7}, .seconds = 1});
  pack.save(path_);
  const std::string good = read();
  expect_corrupt(edited(good, "\tregisters=7", ""),
                 "the index has 'spill_bytes=0' where registers is expected");
  expect_corrupt(edited(good, "name=", "title="),
                 "the index has 'title=a/1' where name is expected");
  expect_corrupt(edited(good, "name=a/1\t", "name=a/1\t\t"),
                 "the index has '' where hash is expected");
  expect_corrupt(edited(good, "losses=\n", "losses="), "the last line of the index has no end");
}

TEST_F(KernelPackFile, TraitsHaveLimits) {
  using kernels::cuda::check_traits;
  using kernels::cuda::Traits;
  const Traits good{.threads = 128, .shared_bytes = 0, .row_tile = 64, .key_tile = 0};
  EXPECT_NO_THROW(check_traits(good, "a/1"));
  const auto expect = [&](const char* words, int32_t Traits::*field, int32_t value) {
    Traits wrong = good;
    wrong.*field = value;
    test::expect_error(ErrorCode::corrupt_file, words, [&] { check_traits(wrong, "a/1"); });
  };
  expect("a/1: threads is 0, must be in [1, 1024]", &Traits::threads, 0);
  expect("threads is -128", &Traits::threads, -128);
  expect("threads is 1025", &Traits::threads, 1025);
  expect("shared_bytes is -1024", &Traits::shared_bytes, -1024);
  expect("shared_bytes is 2147483647", &Traits::shared_bytes, INT32_MAX);
  expect("row_tile is -1", &Traits::row_tile, -1);
  expect("key_tile is 65537", &Traits::key_tile, 65537);
}

// A limit on file sizes fails the write, without a signal, and the old pack remains.
TEST_F(KernelPackFile, ALimitOfFileSizesKeepsTheOldPack) {
  KernelPack pack;
  pack.set(one_, {.cubin = "machine code", .resources = {}, .seconds = 0});
  pack.save(path_);
  const std::string good = read();
  pack.set(two_, {.cubin = std::string(1 << 16, 'x'), .resources = {}, .seconds = 0});
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 64;
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string said = test::error_of([&] { pack.save(path_); }, ErrorCode::io);
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_NE(said.find(path_ + ": cannot write: File too large"), std::string::npos) << said;
  EXPECT_EQ(read(), good);
  pack.save(path_);
  EXPECT_TRUE(KernelPack::open(path_).contains(two_));
}

TEST_F(KernelPackFile, CodeIsCompressed) {
  const std::string code(100'000, 'x');
  KernelPack pack;
  pack.set(one_, {.cubin = code, .resources = {}, .seconds = 0});
  pack.save(path_);
  EXPECT_LT(read().size(), 1000u);
  EXPECT_EQ(KernelPack::open(path_).find(one_)->cubin, code);
}

// Damaged machine code must never be loaded: it has to match byte for byte what was compiled.
TEST_F(KernelPackFile, DamagedCodeIsAnErrorThatNamesIt) {
  std::string code;
  for (int i = 0; i < 64; ++i) code += "machine code " + std::to_string(i * i);
  KernelPack pack;
  pack.set(one_, {.cubin = code, .resources = {}, .seconds = 0});
  pack.save(path_);
  const std::string good = read();
  const std::string size = std::to_string(code.size());
  const size_t frame_bytes = good.size() - end_of_index(good);
  const std::string frame_size = "frame_bytes=" + std::to_string(frame_bytes);
  expect_corrupt(edited(good, "cubin_bytes=" + size, "cubin_bytes=" + size + "0"),
                 "a/1: " + size + "0 bytes where its zstd frame has " + size);
  expect_corrupt(edited(good, "cubin_bytes=" + size, "cubin_bytes=99999999999"),
                 "must be a whole number in [0, 67108864]");
  expect_corrupt(edited(good, frame_size, "frame_bytes=3"), "a/1: its 3 bytes are not one");
  expect_corrupt(edited(good, frame_size, frame_size + "0"), "a/1 lies outside");
  expect_corrupt(edited(good, frame_size, "frame=1"), "frame_bytes");
  for (size_t at = good.size() - frame_bytes; at < good.size(); ++at) {
    std::string damaged = good;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x10);
    write(damaged);
    try {
      EXPECT_EQ(KernelPack::open(path_).find(one_)->cubin, code) << "byte " << at;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt_file);
      EXPECT_NE(std::string(error.what()).find("a/1"), std::string::npos) << error.what();
    }
  }
}

TEST_F(KernelPackFile, AForbiddenCompilationSaysWhatIsMissing) {
  KernelStore store({.pack_path = {}, .cache_path = {}, .allow_compile = false, .announce = {}});
  EXPECT_NE(store.why_not(one_).find("a/1"), std::string::npos);
  EXPECT_THROW(store.get(one_), Error);
}

TEST_F(KernelPackFile, AMissingPackIsNamed) {
  test::expect_error(ErrorCode::io, path_, [&] {
    KernelStore({.pack_path = path_, .cache_path = {}, .allow_compile = true, .announce = {}});
  });
}

// States of the disk cache of compiled kernels. The folder is path_.
class KernelCache : public KernelPackFile {
 protected:
  ~KernelCache() override { std::filesystem::remove_all(path_); }
  KernelStore store(bool allow_compile) {
    return KernelStore({.pack_path = {},
                        .cache_path = path_,
                        .allow_compile = allow_compile,
                        .announce = [&](std::string_view line) { lines_ += line; }});
  }
  std::string file() const {
    return path_ + "/" + content_hash(one_) + "-nvrtc" + nvrtc_version() + ".pack";
  }
  void put(const std::string& bytes) const {
    std::filesystem::create_directories(path_);
    std::ofstream(file(), std::ios::binary) << bytes;
  }

  const KernelVariant real_{.name = "a/real",
                            .program = "extern \"C\" __global__ void s() {}",
                            .symbol = "s",
                            .headers = {},
                            .sm = 90};
  std::string lines_;
};

TEST_F(KernelCache, ServesWhereCompilingIsForbidden) {
  std::filesystem::create_directories(path_);
  KernelPack pack;
  pack.set(one_, {.cubin = "machine code", .resources = {}, .seconds = 0});
  pack.save(file());
  EXPECT_EQ(store(false).why_not(one_), "");
  EXPECT_EQ(store(false).get(one_).cubin, "machine code");
  EXPECT_EQ(store(false).find(one_)->cubin, "machine code");
  EXPECT_FALSE(store(true).find(real_)) << "find() compiled a kernel";
}

TEST_F(KernelCache, DamagedFilesCountAsAbsent) {
  put("no pack");
  EXPECT_NE(store(false).why_not(one_).find("forbidden"), std::string::npos);
  EXPECT_NE(lines_.find(file()), std::string::npos) << lines_;
  test::expect_error(ErrorCode::unsupported, "forbidden", [&] { store(false).get(one_); });
}

TEST_F(KernelCache, DamagedCodeCountsAsAbsent) {
  std::filesystem::create_directories(path_);
  KernelPack pack;
  pack.set(one_, {.cubin = "machine code", .resources = {}, .seconds = 0});
  pack.save(file());
  std::fstream stored(file(), std::ios::in | std::ios::out | std::ios::binary);
  stored.seekp(-1, std::ios::end).put('x');  // damages the checksum
  stored.close();
  EXPECT_NE(store(false).why_not(one_).find("forbidden"), std::string::npos);
  EXPECT_NE(lines_.find(file() + ": a/1"), std::string::npos) << lines_;
}

TEST_F(KernelCache, AnUnwritableFolderDisablesTheCacheOnly) {
  if (!why_no_nvrtc().empty()) GTEST_SKIP() << why_no_nvrtc();
  write("a file where the folder should be");
  EXPECT_FALSE(store(true).get(real_).cubin.empty());
  EXPECT_NE(lines_.find("is not cached: " + path_), std::string::npos) << lines_;
}

TEST_F(KernelCache, KeepsWhatWasCompiled) {
  if (!why_no_nvrtc().empty()) GTEST_SKIP() << why_no_nvrtc();
  const std::string cubin = store(true).get(real_).cubin;
  EXPECT_NE(lines_.find("compiling a/real for sm_90"), std::string::npos) << lines_;
  EXPECT_EQ(store(false).get(real_).cubin, cubin);
}

}  // namespace
}  // namespace fovea::gpu
