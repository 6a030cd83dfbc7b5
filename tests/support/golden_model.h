// SPDX-License-Identifier: Apache-2.0
// The tiny checkpoints of testdata/goldens. Their weights are generated, bitwise equal to those
// that tools/make_tiny_checkpoints.py gave to transformers.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/float_types.h"
#include "model/json_object.h"

namespace fovea {

inline std::filesystem::path golden_source(const std::string& name) {
  return std::filesystem::path(FOVEA_SOURCE_DIR) / "testdata/goldens" / name;
}

inline std::vector<std::string> golden_models() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden_source(""))) {
    names.push_back(entry.path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

// Returns value `index` of the tensor: in [-1, 1), a multiple of 2^-23.
inline float golden_uniform(uint64_t seed, uint64_t index) {
  uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return static_cast<float>(z >> 40) * 0x1p-23f - 1.0f;
}

inline uint64_t golden_seed(std::string_view name) {
  uint64_t seed = 0xCBF29CE484222325u;
  for (const char c : name) seed = (seed ^ static_cast<uint8_t>(c)) * 0x100000001B3u;
  return seed;
}

// A folder with the config of a golden, the weights that its weights.json lists and a tokenizer.
// The destructor removes it.
class GoldenFolder {
 public:
  explicit GoldenFolder(const std::string& name) {
    namespace fs = std::filesystem;
    static int count = 0;
    folder_ = fs::temp_directory_path() /
              ("fovea_golden_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    fs::create_directory(folder_);
    fs::copy_file(golden_source(name) / "config.json", folder_ / "config.json");
    // An engine needs a tokenizer; the goldens' ids are less than its special ids.
    fs::create_symlink(fs::path(FOVEA_SOURCE_DIR) / "testdata/models/llama/tokenizer.json",
                       folder_ / "tokenizer.json");
    write_weights(JsonObject::open((golden_source(name) / "weights.json").string()));
  }
  ~GoldenFolder() { std::filesystem::remove_all(folder_); }
  GoldenFolder(const GoldenFolder&) = delete;
  GoldenFolder& operator=(const GoldenFolder&) = delete;

  std::string path() const { return folder_.string(); }

 private:
  void write_weights(const JsonObject& weights) {
    std::string header;
    std::vector<uint16_t> values;
    for (const std::string& name : weights.fields()) {
      const JsonObject entry = weights.object(name);
      const auto offset = static_cast<float>(entry.number("offset", -1, 1));
      const auto scale = static_cast<float>(entry.number("scale", 0, 16));
      uint64_t size = 1;
      std::string shape;
      for (const int64_t extent : entry.integers("shape", 1, 1 << 20)) {
        size *= static_cast<uint64_t>(extent);
        shape += (shape.empty() ? "" : ",") + std::to_string(extent);
      }
      const uint64_t seed = golden_seed(name);
      const size_t begin = values.size() * 2;
      for (uint64_t i = 0; i < size; ++i) {
        values.push_back(float_to_bf16(offset + scale * golden_uniform(seed, i)));
      }
      header += (header.empty() ? "{\"" : ",\"") + name + R"(":{"dtype":"BF16","shape":[)" + shape +
                R"(],"data_offsets":[)" + std::to_string(begin) + "," +
                std::to_string(values.size() * 2) + "]}";
    }
    header += '}';
    header.resize((header.size() + 7) / 8 * 8, ' ');
    const uint64_t header_size = header.size();
    std::ofstream file(folder_ / "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&header_size), sizeof(header_size));
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    file.write(reinterpret_cast<const char*>(values.data()),
               static_cast<std::streamsize>(values.size() * 2));
  }

  std::filesystem::path folder_;
};

// Generated once per process.
inline std::string golden_folder(const std::string& name) {
  static std::map<std::string, std::unique_ptr<GoldenFolder>> folders;
  std::unique_ptr<GoldenFolder>& folder = folders[name];
  if (!folder) folder = std::make_unique<GoldenFolder>(name);
  return folder->path();
}

}  // namespace fovea
