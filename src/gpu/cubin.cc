// SPDX-License-Identifier: Apache-2.0
#include "gpu/cubin.h"

#include <elf.h>

#include <cstring>

namespace fovea::gpu {
namespace {

std::optional<std::string_view> slice(std::string_view bytes, uint64_t offset, uint64_t size) {
  if (offset > bytes.size() || size > bytes.size() - offset) return std::nullopt;
  return bytes.substr(offset, size);
}

template <typename T>
std::optional<T> read(std::string_view bytes, uint64_t offset) {
  const auto part = slice(bytes, offset, sizeof(T));
  if (!part) return std::nullopt;
  T value;
  std::memcpy(&value, part->data(), sizeof(T));
  return value;
}

std::optional<Elf64_Shdr> section(std::string_view cubin, const Elf64_Ehdr& header,
                                  uint64_t index) {
  if (index >= header.e_shnum || header.e_shentsize != sizeof(Elf64_Shdr)) return std::nullopt;
  return read<Elf64_Shdr>(cubin, header.e_shoff + index * sizeof(Elf64_Shdr));
}

std::string_view name_at(std::string_view names, uint64_t offset) {
  if (offset >= names.size()) return {};
  return names.substr(offset, names.find('\0', offset) - offset);
}

}  // namespace

std::optional<std::string_view> cubin_variable(std::string_view cubin, std::string_view symbol) {
  const auto header = read<Elf64_Ehdr>(cubin, 0);
  if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0) return std::nullopt;
  for (uint64_t i = 0; i < header->e_shnum; ++i) {
    const auto table = section(cubin, *header, i);
    if (!table || table->sh_type != SHT_SYMTAB) continue;
    const auto strings = section(cubin, *header, table->sh_link);
    if (!strings) return std::nullopt;
    const auto names = slice(cubin, strings->sh_offset, strings->sh_size);
    const auto symbols = slice(cubin, table->sh_offset, table->sh_size);
    if (!names || !symbols) return std::nullopt;
    for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= symbols->size(); at += sizeof(Elf64_Sym)) {
      const auto entry = read<Elf64_Sym>(*symbols, at);
      if (name_at(*names, entry->st_name) != symbol) continue;
      const auto home = section(cubin, *header, entry->st_shndx);
      if (!home || home->sh_type != SHT_PROGBITS) return std::nullopt;
      const auto bytes = slice(cubin, home->sh_offset, home->sh_size);
      return bytes ? slice(*bytes, entry->st_value, entry->st_size) : std::nullopt;
    }
  }
  return std::nullopt;
}

}  // namespace fovea::gpu
