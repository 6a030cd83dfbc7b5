# `cmake --install build --prefix DIR`: headers, libraries, the command, and what find_package(fovea) and pkg-config
# read. `--component attention` installs attention alone, `--component engine` adds the rest.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
set(engine_headers engine.h engine_stats.h parallel_engine.h engine_service.h verify_model.h fovea.h dlpack_abi.h)

# Paths relative to the file, so that the folder may be moved.
file(RELATIVE_PATH PC_PREFIX /${pc_dir} /)
string(REGEX REPLACE "/$" "" PC_PREFIX ${PC_PREFIX})

# fovea_install(attention TARGETS a b PC_NAME fovea_attention PC_LIBRARIES -la -lb ...): a component's libraries, its
# targets for CMake and its file for pkg-config.
function(fovea_install component)
  cmake_parse_arguments(ARG "" "PC_NAME;PC_REQUIRES;PC_REQUIRES_PRIVATE" "TARGETS;PC_LIBRARIES" ${ARGN})
  set(part ${component})
  set(ARG_PC_CFLAGS -std=c++20)
  set(ARG_PC_LIBS_PRIVATE "-ldl -pthread")
  if(component STREQUAL c)  # installed with the engine, of which it is the shared library
    set(part engine)
    set(ARG_PC_CFLAGS "")
    set(ARG_PC_LIBS_PRIVATE "")
  endif()
  install(TARGETS ${ARG_TARGETS} EXPORT fovea_${component}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${part} NAMELINK_COMPONENT ${part}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${part})
  install(EXPORT fovea_${component} NAMESPACE fovea:: DESTINATION ${package_dir} FILE ${component}_targets.cmake
          COMPONENT ${part})
  list(JOIN ARG_PC_LIBRARIES " " ARG_PC_LIBRARIES)
  configure_file(cmake/fovea.pc.in ${PROJECT_BINARY_DIR}/${ARG_PC_NAME}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${ARG_PC_NAME}.pc DESTINATION ${pc_dir} COMPONENT ${part})
endfunction()

if(BUILD_SHARED_LIBS)
  fovea_install(attention TARGETS fovea_shared_attention PC_NAME fovea_attention PC_LIBRARIES -lfovea_attention)
  if(FOVEA_ENGINE)
    fovea_install(engine TARGETS fovea_shared_engine PC_NAME fovea PC_LIBRARIES -lfovea)
  endif()
else()
  # Static libraries in the order of linking: each uses those after it.
  fovea_install(attention PC_NAME fovea_attention PC_REQUIRES_PRIVATE "fmt, libzstd"
                TARGETS fovea_static_attention fovea_options fovea_dist fovea_attention fovea_kvcache fovea_kernels fovea_gpu fovea_core
                PC_LIBRARIES -lfovea_dist -lfovea_attention -lfovea_kvcache -lfovea_kernels -lfovea_gpu -lfovea_core)
  if(FOVEA_ENGINE)
    fovea_install(engine PC_NAME fovea PC_REQUIRES fovea_attention PC_REQUIRES_PRIVATE "libpcre2-8, libutf8proc"
                  TARGETS fovea_static_engine fovea_engine fovea_tokenizer fovea_model
                  PC_LIBRARIES -lfovea_engine -lfovea_tokenizer -lfovea_model)
  endif()
endif()

if(FOVEA_C)
  set(c_targets fovea_for_c)
  if(NOT BUILD_SHARED_LIBS)
    list(APPEND c_targets fovea_shared_engine)
  endif()
  fovea_install(c TARGETS ${c_targets} PC_NAME fovea_c PC_LIBRARIES -lfovea)
endif()

list(TRANSFORM engine_headers PREPEND include/fovea/ OUTPUT_VARIABLE engine_header_files)
list(JOIN engine_headers "|" engine_header_pattern)
install(DIRECTORY include/fovea DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT attention
        REGEX "/(${engine_header_pattern}|c)$" EXCLUDE)
if(FOVEA_ENGINE)
  install(FILES ${engine_header_files} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fovea COMPONENT engine)
  install(DIRECTORY include/fovea/c DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fovea COMPONENT engine)
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/doc/fovea COMPONENT attention)
# The command looks for it in its own folder; there is one after `make kernels`.
set(fovea_KERNEL_PACK ${PROJECT_BINARY_DIR}/kernels.pack CACHE INTERNAL "")  # projects around this one see it
install(FILES ${fovea_KERNEL_PACK} DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT attention OPTIONAL)
include(cmake/ship_kernels.cmake)

configure_package_config_file(cmake/foveaConfig.cmake.in ${PROJECT_BINARY_DIR}/foveaConfig.cmake
                              INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_BINDIR
                              NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/foveaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES cmake/dependencies.cmake cmake/ship_kernels.cmake ${PROJECT_BINARY_DIR}/foveaConfig.cmake
        ${PROJECT_BINARY_DIR}/foveaConfigVersion.cmake DESTINATION ${package_dir} COMPONENT attention)
