// SPDX-License-Identifier: Apache-2.0
#include "fovea/device.h"

#include <sys/sysinfo.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <fstream>
#include <string>

#include "core/available_cores.h"

namespace fovea {
namespace {

std::string processor_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "CPU";
}

// True if this processor multiplies tiles of bf16 and the system saves their registers, which it
// does for processes that have asked.
bool allows_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;  // bits in EDX
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

std::string widest_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512cd")) {
    return allows_amx() ? "amx" : "avx512";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "";
}

}  // namespace

std::string device_name(Device device) {
  switch (device.kind) {
    case DeviceKind::cpu:
      return "cpu";
    case DeviceKind::cuda:
      return "cuda:" + std::to_string(device.index);
  }
  return "DeviceKind(" + std::to_string(static_cast<int>(device.kind)) + ")";
}

DeviceInfo cpu_device() {
  DeviceInfo info;
  info.kind = DeviceKind::cpu;
  info.name = processor_name();
  info.isa = widest_isa();
  info.cores = available_cores();
  struct sysinfo memory;
  if (sysinfo(&memory) == 0) info.memory_bytes = memory.totalram * memory.mem_unit;
  return info;
}

}  // namespace fovea
