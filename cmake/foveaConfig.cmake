# find_package(fovea) gives the target fovea::fovea.
include(${CMAKE_CURRENT_LIST_DIR}/dependencies.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/targets.cmake)
