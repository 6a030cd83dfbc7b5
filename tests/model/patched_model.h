// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "support/reference_file.h"

namespace fovea {

// A folder with links to a checkpoint of testdata, by its name, and its config changed by a JSON
// merge patch: null removes a field, the text "null" stands for null. The destructor removes the
// folder.
class PatchedModel {
 public:
  PatchedModel(const std::string& name, const nlohmann::json& patch) {
    namespace fs = std::filesystem;
    static int count = 0;
    folder_ = fs::temp_directory_path() /
              ("fovea_model_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    fs::create_directory(folder_);
    const fs::path source = model_folder(name);
    for (const fs::directory_entry& entry : fs::directory_iterator(source)) {
      const fs::path file = entry.path().filename();
      if (file != "config.json") fs::create_symlink(entry.path(), folder_ / file);
    }
    std::ifstream file(source / "config.json");
    config_ = nlohmann::json::parse(file);
    config_.merge_patch(patch);
    put_nulls(config_);
    std::ofstream(folder_ / "config.json") << config_;
  }
  ~PatchedModel() { std::filesystem::remove_all(folder_); }
  PatchedModel(const PatchedModel&) = delete;
  PatchedModel& operator=(const PatchedModel&) = delete;

  std::string folder() const { return folder_.string(); }
  const nlohmann::json& config() const { return config_; }

 private:
  static void put_nulls(nlohmann::json& value) {
    if (value == "null") value = nullptr;
    if (!value.is_structured()) return;
    for (nlohmann::json& item : value) put_nulls(item);
  }

  std::filesystem::path folder_;
  nlohmann::json config_;
};

}  // namespace fovea
