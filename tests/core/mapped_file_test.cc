// SPDX-License-Identifier: Apache-2.0
// Files that change while they are mapped.
#include "core/mapped_file.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>
#include <vector>

#include "fovea/error.h"
#include "support/expect_error.h"

namespace fovea {
namespace {

namespace fs = std::filesystem;

constexpr size_t kPage = 4096, kBytes = 8 * kPage;

// A file of kBytes ones. The destructor removes it.
class OnesFile {
 public:
  explicit OnesFile(const std::string& name)
      : path_((fs::temp_directory_path() / fmt::format("fovea_{}_{}", name, ::getpid())).string()) {
    std::ofstream(path_, std::ios::binary) << std::string(kBytes, '\1');
  }
  ~OnesFile() { fs::remove(path_); }
  OnesFile(const OnesFile&) = delete;
  OnesFile& operator=(const OnesFile&) = delete;

  const std::string& path() const { return path_; }
  void shorten(size_t bytes) const { fs::resize_file(path_, bytes); }

 private:
  std::string path_;
};

size_t count_ones(const MappedFile& file) {
  return static_cast<size_t>(std::ranges::count(file.bytes(), std::byte{1}));
}

TEST(MappedFile, ReadsZerosWhereAFileWasShortened) {
  const OnesFile ones("shortened"), others("whole");
  const MappedFile file(ones.path()), whole(others.path());
  file.check_intact();
  ones.shorten(2 * kPage + 100);
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&] { EXPECT_EQ(count_ones(file), 2 * kPage + 100); });
  }
  for (std::thread& reader : readers) reader.join();
  test::expect_error(ErrorCode::io, {ones.path(), "shortened from 32768 to 8292 bytes"},
                     [&] { file.check_intact(); });
  EXPECT_EQ(count_ones(whole), kBytes);
  whole.check_intact();
}

// Within its last page, a shortened file reads as zeros and causes no signal.
TEST(MappedFile, NoticesAFewMissingBytes) {
  const OnesFile ones("few_bytes");
  const MappedFile file(ones.path());
  ones.shorten(kBytes - 10);
  EXPECT_EQ(count_ones(file), kBytes - 10);
  test::expect_error(ErrorCode::io, "from 32768 to 32758 bytes", [&] { file.check_intact(); });
}

TEST(MappedFile, RemembersWhatWasMissingForAWhile) {
  const OnesFile ones("for_a_while");
  const MappedFile file(ones.path());
  ones.shorten(kPage);
  EXPECT_EQ(count_ones(file), kPage);
  ones.shorten(kBytes);
  test::expect_error(ErrorCode::io, {ones.path(), "missing for a while"},
                     [&] { file.check_intact(); });
  const MappedFile again(ones.path());
  again.check_intact();
}

// The handler passes faults in other mappings on to the previous handler.
TEST(MappedFileDeathTest, PassesOtherSignalsOn) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto access = [](bool has_handler) {
    if (has_handler) std::signal(SIGBUS, [](int) { ::_exit(42); });
    const OnesFile ones("other_mapping");
    const MappedFile mapped(ones.path());
    const int file = ::open(ones.path().c_str(), O_RDONLY);
    const auto* other_mapping =
        static_cast<const volatile char*>(::mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE, file, 0));
    ones.shorten(0);
    if (count_ones(mapped) == 0) (void)other_mapping[kPage];
    ::_exit(1);
  };
  EXPECT_EXIT(access(true), testing::ExitedWithCode(42), "");
  EXPECT_EXIT(access(false), testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(
      {
        const OnesFile ones("sent");
        const MappedFile mapped(ones.path());
        ::raise(SIGBUS);
        ::_exit(1);
      },
      testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace fovea
