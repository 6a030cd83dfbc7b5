// SPDX-License-Identifier: Apache-2.0
// Fovea for C and for every language that calls C: attention, its caches and the engine, in
// libfovea.so. docs/c_api.md has the idea and a whole program. Names and meanings are those of the
// C++ headers.
//
// Calls. A function returns FOVEA_OK or the kind of its failure; fovea_last_error() then names the
// argument, its value and the limit. A failed call changes nothing unless its comment says so. No
// C++ exception leaves a function.
//
// Handles. `..._create` and its relatives give a handle, `..._destroy` takes it (or NULL). A handle
// keeps alive whatever it was made from, so the order of destruction is free. A handle of another
// kind is refused. Calls on one handle must not overlap; different handles are independent, but
// forward() calls of backends on one pool or thread pool follow the rules of the C++ headers.
//
// Structs that may grow begin with struct_size. Fill them by their `..._init` function, then set
// fields. A program and a library of different versions understand each other: fields that a
// smaller struct lacks have their defaults; fields of a larger one that the library does not know
// must be 0. Structs without struct_size never change.
//
// Tensors are borrowed views: a call reads the DLTensor and keeps only addresses. The memory that
// plan() receives stays valid and unchanged until the last forward() of the pass has run. Enums and
// flags are int32_t; a flag is 0 or 1. Text is UTF-8 that ends with a zero byte.
//
// Text and arrays come by two calls. `*bytes` or `*count` holds the capacity, and afterwards the
// full size (of text: with its zero byte). With a null buffer only the size is set. A buffer that
// is too small is FOVEA_INVALID_ARGUMENT; nothing is written to it, and the size is set.
//
// Memory is allocated by `..._create`, `..._load`, `..._reserve`, compositions, prefix caches and
// the engine. Plan, forward, merge and the calls of request tables, page allocators and pools
// allocate none.
#ifndef FOVEA_FOVEA_H_
#define FOVEA_FOVEA_H_

#include "fovea/c/attention.h"
#include "fovea/c/base.h"
#include "fovea/c/engine.h"
#include "fovea/c/prefix_cache.h"
#include "fovea/c/select.h"
#include "fovea/c/specs.h"
#include "fovea/c/storage.h"
#include "fovea/dlpack_abi.h"

#endif  // FOVEA_FOVEA_H_
