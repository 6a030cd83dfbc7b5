// SPDX-License-Identifier: Apache-2.0
// Counts allocations by the global operator new, or lets them fail. It replaces all forms of the
// operator: AddressSanitizer refuses memory that a different form deletes, and std::stable_sort
// uses the forms that do not throw. Include it in one source file of a program.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace fovea::test {

inline std::atomic<int64_t> allocations{0};
inline std::atomic<int64_t> allocated_bytes{0};  // includes freed bytes
// Number of allocations before one fails; negative: none fails.
inline std::atomic<int64_t> allocations_before_failure{-1};
// If true, all later allocations fail, too, until allocations_before_failure is negative.
inline std::atomic<bool> failure_lasts{false};

inline void* count_allocation(size_t size, std::align_val_t alignment) noexcept {
  ++allocations;
  allocated_bytes += static_cast<int64_t>(size);
  if (allocations_before_failure == 0 && failure_lasts) return nullptr;
  if (allocations_before_failure >= 0 && allocations_before_failure-- == 0) return nullptr;
  const auto unit = static_cast<size_t>(alignment);
  return std::aligned_alloc(unit, size == 0 ? unit : (size + unit - 1) / unit * unit);
}
inline void* count_or_throw(size_t size, std::align_val_t alignment) {
  void* memory = count_allocation(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
constexpr std::align_val_t kNewAlignment{__STDCPP_DEFAULT_NEW_ALIGNMENT__};

}  // namespace fovea::test

// Not inline: if GCC inlines only one of a pair, it warns about a mismatched pair.
[[gnu::noinline]] void* operator new(size_t size) {
  return fovea::test::count_or_throw(size, fovea::test::kNewAlignment);
}
[[gnu::noinline]] void* operator new[](size_t size) {
  return fovea::test::count_or_throw(size, fovea::test::kNewAlignment);
}
[[gnu::noinline]] void* operator new(size_t size, std::align_val_t alignment) {
  return fovea::test::count_or_throw(size, alignment);
}
[[gnu::noinline]] void* operator new[](size_t size, std::align_val_t alignment) {
  return fovea::test::count_or_throw(size, alignment);
}
[[gnu::noinline]] void* operator new(size_t size, const std::nothrow_t&) noexcept {
  return fovea::test::count_allocation(size, fovea::test::kNewAlignment);
}
[[gnu::noinline]] void* operator new[](size_t size, const std::nothrow_t&) noexcept {
  return fovea::test::count_allocation(size, fovea::test::kNewAlignment);
}
[[gnu::noinline]] void* operator new(size_t size, std::align_val_t alignment,
                                     const std::nothrow_t&) noexcept {
  return fovea::test::count_allocation(size, alignment);
}
[[gnu::noinline]] void* operator new[](size_t size, std::align_val_t alignment,
                                       const std::nothrow_t&) noexcept {
  return fovea::test::count_allocation(size, alignment);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, size_t, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
