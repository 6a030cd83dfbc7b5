// SPDX-License-Identifier: Apache-2.0
// The version of these headers. The CMake package and pkg-config read it from here.
#pragma once

#define FOVEA_VERSION_MAJOR 0
#define FOVEA_VERSION_MINOR 1
#define FOVEA_VERSION_PATCH 0

// For #if: 10203 is 1.2.3.
#define FOVEA_VERSION_NUMBER \
  (FOVEA_VERSION_MAJOR * 10000 + FOVEA_VERSION_MINOR * 100 + FOVEA_VERSION_PATCH)

#define FOVEA_DETAIL_DOTTED(major, minor, patch) #major "." #minor "." #patch
#define FOVEA_DETAIL_EXPANDED(major, minor, patch) FOVEA_DETAIL_DOTTED(major, minor, patch)
// "1.2.3"
#define FOVEA_VERSION \
  FOVEA_DETAIL_EXPANDED(FOVEA_VERSION_MAJOR, FOVEA_VERSION_MINOR, FOVEA_VERSION_PATCH)
