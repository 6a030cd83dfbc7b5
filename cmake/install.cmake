# `cmake --install build --prefix DIR`: headers, libraries, the command, and what find_package(fovea) and pkg-config
# read.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)
# Each uses those behind it.
set(libraries fovea_engine fovea_tokenizer fovea_model fovea_attention fovea_kvcache fovea_kernels fovea_gpu fovea_core)

install(TARGETS fovea fovea_options ${libraries} EXPORT fovea ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/fovea)
# Beside the command, where it looks for it; there is one after `make kernels`.
set(fovea_KERNEL_PACK ${PROJECT_BINARY_DIR}/kernels.pack CACHE INTERNAL "")  # projects around this one see it
install(FILES ${fovea_KERNEL_PACK} DESTINATION ${CMAKE_INSTALL_BINDIR} OPTIONAL)
include(cmake/ship_kernels.cmake)

install(EXPORT fovea NAMESPACE fovea:: DESTINATION ${package_dir} FILE targets.cmake)
configure_package_config_file(cmake/foveaConfig.cmake.in ${PROJECT_BINARY_DIR}/foveaConfig.cmake
                              INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_BINDIR
                              NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/foveaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/dependencies.cmake cmake/ship_kernels.cmake ${PROJECT_BINARY_DIR}/foveaConfig.cmake
        ${PROJECT_BINARY_DIR}/foveaConfigVersion.cmake DESTINATION ${package_dir})

# Paths relative to the file, so that the folder may be moved.
file(RELATIVE_PATH PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" PC_PREFIX ${PC_PREFIX})
list(TRANSFORM libraries PREPEND -l OUTPUT_VARIABLE PC_LIBRARIES)
list(JOIN PC_LIBRARIES " " PC_LIBRARIES)
configure_file(cmake/fovea.pc.in ${PROJECT_BINARY_DIR}/fovea.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fovea.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
