// SPDX-License-Identifier: Apache-2.0
// A folder that replaces "/": the test writes the contents of /proc and /sys.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace fovea::test {

class FakeRoot {
 public:
  FakeRoot()
      : root_(std::filesystem::temp_directory_path() /
              ("fovea_fake_root_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(root_);
  }
  ~FakeRoot() { std::filesystem::remove_all(root_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  std::string path() const { return root_.string(); }

 private:
  std::filesystem::path root_;
};

}  // namespace fovea::test
