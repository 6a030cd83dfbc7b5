// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/family.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "core/check.h"
#include "kernels/cuda/sources.h"

namespace fovea::kernels::cuda {
namespace {

constexpr std::string_view kRoot = "kernels/cuda/";
constexpr std::string_view kVariants = "/variants.txt";

std::vector<std::string> words(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> found;
  for (std::string word; stream >> word;) found.push_back(word);
  return found;
}

// First "sm" and the architectures, then the column names, then one variant a line; '#' comments.
Family parse_family(std::string_view folder, std::string_view text) {
  Family family;
  family.folder = folder;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    std::vector<std::string> row = words(line.substr(0, line.find('#')));
    if (row.empty()) continue;
    if (family.sms.empty()) {
      for (size_t i = 1; i < row.size(); ++i) family.sms.push_back(std::stoi(row[i]));
    } else if (family.columns.empty()) {
      family.columns = std::move(row);
    } else {
      check_argument(row.size() == family.columns.size(),
                     "{}: a line has {} values, the columns are {}", folder, row.size(),
                     family.columns.size());
      family.baked.push_back(std::move(row));
    }
  }
  return family;
}

std::vector<Family> read_families() {
  std::vector<Family> found;
  for (const SourceFile& file : source_files()) {
    if (!file.name.ends_with(kVariants)) continue;
    std::string_view folder = file.name.substr(kRoot.size());
    folder.remove_suffix(kVariants.size());
    found.push_back(parse_family(folder, file.text));
  }
  return found;
}

std::string_view text_of(std::string_view name) {
  const auto files = source_files();
  const auto found = std::ranges::find(files, name, &SourceFile::name);
  if (found == files.end()) fail(ErrorCode::invalid_argument, "no device source {}", name);
  return found->text;
}

// The headers a program includes, directly or not: only they enter its hash.
void collect_headers(std::string_view text, std::set<std::string>& names) {
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("#include \"")) continue;
    const std::string name = line.substr(10, line.find('"', 10) - 10);
    if (names.insert(name).second) collect_headers(text_of(name), names);
  }
}

}  // namespace

const std::vector<Family>& families() {
  static const std::vector<Family> all = read_families();
  return all;
}

const Family& family(std::string_view folder) {
  std::string known;
  for (const Family& candidate : families()) {
    if (candidate.folder == folder) return candidate;
    known += (known.empty() ? "" : ", ") + candidate.folder;
  }
  fail(ErrorCode::invalid_argument, "no kernel family {}, known: {}", folder, known);
}

gpu::KernelVariant make_variant(const Family& family, const VariantValues& values, int sm) {
  gpu::KernelVariant variant;
  variant.sm = sm;
  std::string arguments;
  std::string label;
  for (const std::string& value : values) {
    arguments += (arguments.empty() ? "" : ", ") + value;
    label += (label.empty() ? "" : "_") + value;
  }
  variant.name = fmt::format("{}/{}.sm{}", family.folder, label, sm);
  variant.symbol = "fovea_kernel";
  variant.program = fmt::format(
      "#include \"{}{}/kernel.cuh\"\nusing namespace fovea::kernels::cuda;\n"
      "FOVEA_KERNEL_ENTRY(Config<{}>)\n",
      kRoot, family.folder, arguments);
  std::set<std::string> names;
  collect_headers(variant.program, names);
  for (const std::string& name : names) variant.headers.emplace_back(name, text_of(name));
  return variant;
}

}  // namespace fovea::kernels::cuda
