// SPDX-License-Identifier: Apache-2.0
// FOVEA_API marks the declarations that a shared Fovea exports; everything else in it is hidden.
#pragma once

#define FOVEA_API [[gnu::visibility("default")]]
