# `cmake --install build --prefix DIR`: headers, libraries, the command, and what find_package(fovea) reads.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)

install(TARGETS fovea fovea_options fovea_core fovea_gpu fovea_kernels fovea_kvcache fovea_attention fovea_model
        fovea_engine EXPORT fovea ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
# Beside the command, where it looks for it; there is one after `make kernels`.
install(FILES ${PROJECT_BINARY_DIR}/kernels.pack DESTINATION ${CMAKE_INSTALL_BINDIR} OPTIONAL)
install(EXPORT fovea NAMESPACE fovea:: DESTINATION ${package_dir} FILE targets.cmake)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/foveaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/foveaConfig.cmake cmake/dependencies.cmake ${PROJECT_BINARY_DIR}/foveaConfigVersion.cmake
        DESTINATION ${package_dir})
