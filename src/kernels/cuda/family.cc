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

std::string kernel_file(std::string_view folder) {
  return fmt::format("{}{}/kernel.cuh", kRoot, folder);
}

std::string_view text_of(std::string_view name) {
  const auto files = source_files();
  const auto found = std::ranges::find(files, name, &SourceFile::name);
  if (found == files.end()) fail(ErrorCode::invalid_argument, "no device source {}", name);
  return found->text;
}

// A header and those that it includes, directly or not: only they enter a program's hash.
void collect_headers(std::string_view name, std::set<std::string_view>& names) {
  if (!names.insert(name).second) return;
  constexpr std::string_view kInclude = "\n#include \"";
  const std::string_view text = text_of(name);
  for (size_t at = text.find(kInclude); at != text.npos; at = text.find(kInclude, at)) {
    at += kInclude.size();
    collect_headers(text.substr(at, text.find('"', at) - at), names);
  }
}

std::shared_ptr<const gpu::Headers> headers_of(std::string_view folder) {
  const std::string kernel = kernel_file(folder);
  std::set<std::string_view> names;
  collect_headers(kernel, names);
  gpu::Headers::Texts texts;
  for (const std::string_view name : names) texts.emplace_back(name, text_of(name));
  return std::make_shared<const gpu::Headers>(std::move(texts));
}

std::vector<Family> read_families() {
  std::vector<Family> found;
  for (const SourceFile& file : source_files()) {
    if (!file.name.ends_with(kVariants)) continue;
    std::string_view folder = file.name.substr(kRoot.size());
    folder.remove_suffix(kVariants.size());
    found.push_back(parse_family(folder, file.text));
    found.back().headers = headers_of(folder);
  }
  return found;
}

}  // namespace

const std::vector<Family>& families() {
  static const std::vector<Family> all = read_families();
  return all;
}

const Family& family(std::string_view folder) {
  const auto found = std::ranges::find(families(), folder, &Family::folder);
  if (found != families().end()) return *found;
  std::string known;
  for (const Family& candidate : families()) {
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
      "#include \"{}\"\nusing namespace fovea::kernels::cuda;\n"
      "FOVEA_KERNEL_ENTRY(Config<{}>)\n",
      kernel_file(family.folder), arguments);
  variant.headers = family.headers;
  return variant;
}

}  // namespace fovea::kernels::cuda
