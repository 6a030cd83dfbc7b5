// SPDX-License-Identifier: Apache-2.0
// Reading variables from machine code, intact and damaged.
#include "gpu/cubin.h"

#include <elf.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace fovea::gpu {
namespace {

// Returns an ELF64 file of one section with one variable.
std::string elf_with(const std::string& symbol, const std::string& content) {
  const std::string names = '\0' + symbol + '\0';
  Elf64_Sym variable{};
  variable.st_name = 1;
  variable.st_shndx = 1;
  variable.st_value = 2;
  variable.st_size = content.size();
  const uint64_t data_at = sizeof(Elf64_Ehdr), symbols_at = data_at + 2 + content.size(),
                 names_at = symbols_at + sizeof(variable), table_at = names_at + names.size();
  Elf64_Shdr sections[4] = {};
  sections[1] = {.sh_type = SHT_PROGBITS, .sh_offset = data_at, .sh_size = 2 + content.size()};
  sections[2] = {
      .sh_type = SHT_SYMTAB, .sh_offset = symbols_at, .sh_size = sizeof(variable), .sh_link = 3};
  sections[3] = {.sh_type = SHT_STRTAB, .sh_offset = names_at, .sh_size = names.size()};
  Elf64_Ehdr header{};
  std::copy_n(ELFMAG, SELFMAG, header.e_ident);
  header.e_shoff = table_at;
  header.e_shentsize = sizeof(Elf64_Shdr);
  header.e_shnum = 4;
  const auto bytes = [](const auto& value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  return bytes(header) + "xx" + content + bytes(variable) + names + bytes(sections);
}

TEST(Cubin, VariablesAreRead) {
  const std::string cubin = elf_with("fovea_traits", "abcd");
  EXPECT_EQ(cubin_variable(cubin, "fovea_traits"), "abcd");
  EXPECT_EQ(cubin_variable(cubin, "fovea"), std::nullopt);
}

TEST(Cubin, DamagedFilesAreNotFollowed) {
  const std::string cubin = elf_with("fovea_traits", "abcd");
  for (size_t size = 0; size < cubin.size(); ++size) {
    EXPECT_EQ(cubin_variable(std::string_view(cubin).substr(0, size), "fovea_traits"), std::nullopt)
        << size;
  }
  for (size_t at = 0; at < cubin.size(); ++at) {
    std::string damaged = cubin;
    damaged[at] = '\xff';
    const auto found = cubin_variable(damaged, "fovea_traits");
    if (!found) continue;
    EXPECT_GE(found->data(), damaged.data());
    EXPECT_LE(found->data() + found->size(), damaged.data() + damaged.size());
  }
}

}  // namespace
}  // namespace fovea::gpu
