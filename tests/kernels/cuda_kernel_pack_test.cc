// SPDX-License-Identifier: Apache-2.0
// Kernel packs and the compiler's report, on machines without a GPU or NVRTC.
#include <elf.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "fovea/error.h"
#include "gpu/cubin.h"
#include "gpu/kernel_pack.h"
#include "kernels/cuda/family.h"

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
  void expect_corrupt(const std::string& bytes) const {
    write(bytes);
    try {
      KernelPack::open(path_);
      FAIL() << "accepted " << bytes.size() << " bytes";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt_file);
      EXPECT_NE(std::string(error.what()).find(path_), std::string::npos);
    }
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
                  .resources = {.spill_bytes = 8, .losses = "(C7510) serialized"},
                  .seconds = 1});
  pack.save(path_);
  const KernelPack again = KernelPack::open(path_);
  ASSERT_NE(again.find(one_), nullptr);
  EXPECT_EQ(again.find(one_)->cubin, std::string("\0one", 4));
  EXPECT_EQ(again.find(one_)->resources.registers, 7);
  EXPECT_EQ(again.find(one_)->resources.losses, "");
  EXPECT_EQ(again.find(two_)->resources.spill_bytes, 8);
  EXPECT_EQ(again.find(two_)->resources.losses, "(C7510) serialized");
}

TEST_F(KernelPackFile, EntriesOfOtherSourcesAreStale) {
  KernelPack pack;
  pack.set(one_, {.cubin = "one", .resources = {}, .seconds = 0});
  KernelVariant edited = one_;
  edited.headers = {{"h", "new"}};
  EXPECT_EQ(pack.find(edited), nullptr);
  edited = one_;
  edited.sm = 80;
  EXPECT_EQ(pack.find(edited), nullptr);
  edited = one_;
  edited.flags.push_back("--use_fast_math");
  EXPECT_EQ(pack.find(edited), nullptr);
  edited.flags.assign(one_.flags.begin() + 1, one_.flags.end());
  EXPECT_EQ(pack.find(edited), nullptr);
  EXPECT_EQ(pack.find(two_), nullptr);
}

// `make kernels` over a pack of before a field of the index: it is built anew, not refused.
TEST_F(KernelPackFile, OlderPacksOpen) {
  KernelPack pack;
  pack.set(one_, {.cubin = "one", .resources = {}, .seconds = 0});
  pack.save(path_);
  std::string bytes = read();
  const std::string field = R"("losses":"",)";
  ASSERT_NE(bytes.find(field), std::string::npos);
  bytes.erase(bytes.find(field), field.size());
  uint64_t index_bytes = 0;
  std::memcpy(&index_bytes, &bytes[8], sizeof(index_bytes));
  index_bytes -= field.size();
  std::memcpy(&bytes[8], &index_bytes, sizeof(index_bytes));
  write(bytes);
  EXPECT_EQ(KernelPack::open(path_).entries().size(), 1u);
}

TEST_F(KernelPackFile, DamagedFilesAreErrors) {
  KernelPack pack;
  pack.set(one_, {.cubin = "machine code", .resources = {}, .seconds = 0});
  pack.save(path_);
  const std::string good = read();
  expect_corrupt("");
  expect_corrupt("NOTAPACK" + good.substr(8));
  expect_corrupt(good.substr(0, 20));
  expect_corrupt(good.substr(0, good.size() - 1));
  std::string longer = good;
  longer[8] = '\xff';
  longer[12] = '\xff';
  expect_corrupt(longer);
}

TEST_F(KernelPackFile, AForbiddenCompilationSaysWhatIsMissing) {
  KernelStore store({.pack_path = {}, .cache_path = {}, .allow_compile = false, .announce = {}});
  EXPECT_NE(store.why_not(one_).find("a/1"), std::string::npos);
  EXPECT_THROW(store.get(one_), Error);
}

TEST_F(KernelPackFile, AMissingPackIsNamed) {
  try {
    KernelStore store(
        {.pack_path = path_, .cache_path = {}, .allow_compile = true, .announce = {}});
    FAIL() << "opened " << path_;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(std::string(error.what()).find(path_), std::string::npos);
  }
}

// What the disk cache of compiled kernels can be; the folder is path_.
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
}

TEST_F(KernelCache, DamagedFilesCountAsAbsent) {
  put("no pack");
  EXPECT_NE(store(false).why_not(one_).find("forbidden"), std::string::npos);
  EXPECT_NE(lines_.find(file()), std::string::npos) << lines_;
  try {
    store(false).get(one_);
    FAIL() << "took a damaged kernel";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
  }
}

TEST_F(KernelCache, AFolderThatCannotBeWrittenCostsTheCacheOnly) {
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

TEST(ResourceReport, BelongsToItsEntryPoint) {
  const std::string log =
      "ptxas info    : Compiling entry function 'other' for 'sm_90a'\n"
      "    96 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
      "ptxas info    : Used 255 registers, 10 bytes smem\n"
      "ptxas info    : Compiling entry function 'fovea_kernel' for 'sm_90a'\n"
      "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 203 registers, used 1 barriers, 400 bytes smem\n";
  EXPECT_EQ(parse_resource_use(log, "fovea_kernel").registers, 203);
  EXPECT_EQ(parse_resource_use(log, "fovea_kernel").spill_bytes, 0);
  EXPECT_EQ(parse_resource_use(log, "fovea_kernel").shared_bytes, 400);
  EXPECT_EQ(parse_resource_use(log, "other").spill_bytes, 12);
  EXPECT_EQ(parse_resource_use(log, "other").losses, "");
}

TEST(ResourceReport, KeepsEveryNoteOfLostPerformance) {
  const std::string log =
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
      "serialized due to the presence of Extern calls in the function 'fovea_kernel'\n"
      "ptxas info    : Compiling entry function 'fovea_kernel' for 'sm_90a'\n"
      "ptxas info    : Used 203 registers, used 1 barriers, 400 bytes smem\n"
      "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored.";
  const ResourceUse use = parse_resource_use(log, "fovea_kernel");
  EXPECT_EQ(use.registers, 203);
  EXPECT_EQ(use.losses,
            "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due "
            "to the presence of Extern calls in the function 'fovea_kernel'\n"
            "(C7508) Potential Performance Loss: 'setmaxnreg' ignored.");
}

TEST(Families, EveryBakedKernelHasItsSources) {
  using namespace kernels::cuda;
  EXPECT_FALSE(families().empty());
  for (const Family& family : families()) {
    for (const VariantValues& values : family.baked) {
      const KernelVariant variant = make_variant(family, values, family.sms.front());
      EXPECT_FALSE(variant.headers.empty()) << variant.name;
      EXPECT_NE(variant.program.find("Config<" + values.front()), std::string::npos);
    }
  }
  EXPECT_THROW(family("nothing/here"), Error);
}

// An ELF64 file of one section with one variable.
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
