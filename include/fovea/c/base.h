// SPDX-License-Identifier: Apache-2.0
// Status, versions, devices, tensors and threads. Include fovea/fovea.h.
#ifndef FOVEA_C_BASE_H_
#define FOVEA_C_BASE_H_

#include <stddef.h>
#include <stdint.h>

#include "fovea/dlpack_abi.h"

#if defined(__GNUC__)
#define FOVEA_C_API __attribute__((visibility("default")))
#else
#define FOVEA_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t fovea_status;
enum {
  FOVEA_OK = 0,
  FOVEA_INVALID_ARGUMENT = 1,     // an argument is outside the documented limits
  FOVEA_UNSUPPORTED = 2,          // valid, but not available here; the message lists the reasons
  FOVEA_OUT_OF_MEMORY = 3,        // a budget or the system is exhausted
  FOVEA_WORKSPACE_TOO_SMALL = 4,  // the message names the bytes needed
  FOVEA_CORRUPT_FILE = 5,         // a checkpoint, config or tokenizer file is malformed
  FOVEA_IO = 6,                   // the operating system refused a read or a mapping
  FOVEA_DEVICE_FAILURE = 7,       // a GPU driver refused a call, or an earlier call failed
  FOVEA_FULL = 8,                 // no free row, page or slot is left; nothing was taken
  FOVEA_INTERNAL = 9              // a failure that should not occur
};

// Returns the message of the last call on this thread that failed, "" before the first. Valid until
// another call fails on this thread.
FOVEA_C_API const char* fovea_last_error(void);

// Returns the version of the binary interface. It changes only if programs built before would
// break.
#define FOVEA_ABI_VERSION 1
FOVEA_C_API uint32_t fovea_abi_version(void);
// Returns the version of the library, "1.2.3".
FOVEA_C_API const char* fovea_version(void);

// Groups of functions, for programs that look them up at run time.
enum {
  FOVEA_FEATURE_ATTENTION = 1 << 0,       // selection, pools, plan, forward
  FOVEA_FEATURE_LINEAR = 1 << 1,          // linear layers and state pools
  FOVEA_FEATURE_MERGE = 1 << 2,           // merging of states
  FOVEA_FEATURE_COMPOSE = 1 << 3,         // composition by phase and by layer
  FOVEA_FEATURE_PREFIX_CACHE = 1 << 4,    // prefix caches
  FOVEA_FEATURE_PASS_ADDRESSES = 1 << 5,  // addresses inside captured passes
  FOVEA_FEATURE_ENGINE = 1 << 6           // the engine
};
FOVEA_C_API uint64_t fovea_features(void);

typedef int32_t fovea_dtype;
enum {
  FOVEA_F32 = 0,
  FOVEA_F16 = 1,
  FOVEA_BF16 = 2,
  FOVEA_F8E4M3 = 3,  // OCP e4m3fn: finite, saturates at +-448
  FOVEA_F8E5M2 = 4,  // OCP e5m2: has infinities
  FOVEA_I32 = 5,
  FOVEA_I64 = 6,
  FOVEA_U8 = 7
};
// Gives the dtype with this name: "fp32", "bf16", "fp8_e4m3" and the usual synonyms.
FOVEA_C_API fovea_status fovea_parse_dtype(const char* name, fovea_dtype* dtype);

enum { FOVEA_CPU = 0, FOVEA_CUDA = 1 };
typedef struct fovea_device {
  int32_t kind;
  int32_t index;
} fovea_device;

typedef struct fovea_device_info {
  uint32_t struct_size;
  int32_t sm;  // compute capability * 10 (90 for Hopper); 0 on the CPU
  fovea_device device;
  int32_t cores;          // CPU threads or streaming multiprocessors
  int32_t reserved;       // 0
  uint64_t memory_bytes;  // total
  char name[128];         // the processor's own name
  char isa[16];           // instruction set of CPU kernels: "amx", "avx512", "avx2" or ""
} fovea_device_info;
FOVEA_C_API fovea_status fovea_device_info_init(fovea_device_info* info, size_t struct_size);
// Describes the device "cpu", "cuda" (the first GPU) or "cuda:N". FOVEA_UNSUPPORTED without a GPU.
FOVEA_C_API fovea_status fovea_find_device(const char* name, fovea_device_info* info);
// Counts the GPUs that the driver lists: "cuda:0" ... "cuda:<count - 1>".
FOVEA_C_API fovea_status fovea_gpu_count(int32_t* count);
// Gives the reason why no GPU can be used; empty: there is one.
FOVEA_C_API fovea_status fovea_why_no_gpu(char* text, size_t* bytes);

// Sources from which this process takes GPU kernels, in the order pack, cache folder, compiler.
enum {
  FOVEA_KERNEL_PACK = 0,            // path of the pack; empty: none
  FOVEA_KERNEL_WHY_NO_PACK = 1,     // why the pack cannot be read; empty: it can
  FOVEA_KERNEL_CACHE = 2,           // path of the folder; empty: none
  FOVEA_KERNEL_COMPILER = 3,        // "NVRTC 13.0"; empty: none, or it is forbidden
  FOVEA_KERNEL_WHY_NO_COMPILER = 4  // empty: missing kernels are compiled
};
FOVEA_C_API fovea_status fovea_kernel_source(int32_t source, char* text, size_t* bytes);

// A DLTensor with its shape, for memory of C programs. Do not copy one: `view` points into it.
#define FOVEA_TENSOR_DIMENSIONS 4
typedef struct fovea_tensor {
  DLTensor view;
  int64_t shape[FOVEA_TENSOR_DIMENSIONS];
  int64_t strides[FOVEA_TENSOR_DIMENSIONS];
} fovea_tensor;
// Makes `tensor` a view of dense memory, the last dimension varying fastest. A stride may be
// changed afterwards. The shape has ndim entries, 1 to FOVEA_TENSOR_DIMENSIONS.
FOVEA_C_API fovea_status fovea_tensor_init(fovea_tensor* tensor, void* data, fovea_dtype dtype,
                                           fovea_device device, const int64_t* shape, int32_t ndim);
// Gives the view inside a managed tensor, which the caller continues to own. `writes` is 1 if Fovea
// will write the tensor (out, lse, a lent cache): a read-only tensor is then refused. `name` stands
// in messages.
FOVEA_C_API fovea_status fovea_tensor_of_managed(const DLManagedTensorVersioned* managed,
                                                 int32_t writes, const char* name,
                                                 const DLTensor** tensor);

// The threads of CPU kernels. Backends and mergers that share a pool take turns.
typedef struct fovea_thread_pool fovea_thread_pool;
// `threads` is in [0, 1024]; 0: one per core.
FOVEA_C_API fovea_status fovea_thread_pool_create(int32_t threads, fovea_thread_pool** pool);
FOVEA_C_API fovea_status fovea_thread_pool_size(const fovea_thread_pool* pool, int32_t* size);
FOVEA_C_API fovea_status fovea_thread_pool_destroy(fovea_thread_pool* pool);

#ifdef __cplusplus
}
#endif

#endif  // FOVEA_C_BASE_H_
