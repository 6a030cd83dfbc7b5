# What other projects link: fovea::attention or, with models and text, fovea::fovea, which contains the former. Each is the
# headers of include/, C++20, and either the layers as static libraries or one shared library of the same objects. A
# program links one of the two. Programs in C link fovea::c, which is always the shared library of the engine.
set(fovea_layers_attention dist attention kvcache kernels gpu core)
set(fovea_layers_engine c engine tokenizer model ${fovea_layers_attention})
set(fovea_top_attention dist)
set(fovea_top_engine engine)
set(fovea_target_attention attention)
set(fovea_target_engine fovea)
set(fovea_kind static)
if(BUILD_SHARED_LIBS)
  set(fovea_kind shared)
endif()

function(fovea_describe_interface library component)
  target_include_directories(${library} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                             $<INSTALL_INTERFACE:include>)
  target_compile_features(${library} INTERFACE cxx_std_20)
  set_target_properties(${library} PROPERTIES EXPORT_NAME ${fovea_target_${component}})
endfunction()

function(fovea_static_library component)
  add_library(fovea_static_${component} INTERFACE)
  fovea_describe_interface(fovea_static_${component} ${component})
  target_link_libraries(fovea_static_${component} INTERFACE $<LINK_ONLY:fovea_${fovea_top_${component}}>)
endfunction()

# libfovea_attention.so or libfovea.so. exported_symbols.map drops the templates of other libraries, which no option hides.
function(fovea_shared_library component)
  set(library fovea_shared_${component})
  set(output fovea)
  if(component STREQUAL attention)
    set(output fovea_attention)
  endif()
  file(WRITE ${PROJECT_BINARY_DIR}/no_source_of_its_own.cc "")
  add_library(${library} SHARED ${PROJECT_BINARY_DIR}/no_source_of_its_own.cc)
  fovea_describe_interface(${library} ${component})
  list(TRANSFORM fovea_layers_${component} PREPEND fovea_ OUTPUT_VARIABLE layers)
  list(JOIN layers "," layers)
  set_target_properties(${library} PROPERTIES OUTPUT_NAME ${output} VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
                        LINK_LIBRARY_OVERRIDE "WHOLE_ARCHIVE,${layers}"
                        LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/exported_symbols.map)
  target_link_libraries(${library} PRIVATE "$<LINK_LIBRARY:WHOLE_ARCHIVE,${layers}>")
  target_link_options(${library} PRIVATE
                      LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exported_symbols.map)
endfunction()

# Tests link the shared libraries in every build without sanitizers.
foreach(component IN LISTS fovea_components)
  fovea_static_library(${component})
  if(BUILD_SHARED_LIBS OR (FOVEA_C AND component STREQUAL engine) OR (FOVEA_TESTS AND NOT FOVEA_SANITIZE))
    fovea_shared_library(${component})
  endif()
  add_library(fovea::${fovea_target_${component}} ALIAS fovea_${fovea_kind}_${component})
endforeach()

if(FOVEA_C)
  add_library(fovea_for_c INTERFACE)
  target_include_directories(fovea_for_c INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                             $<INSTALL_INTERFACE:include>)
  target_link_libraries(fovea_for_c INTERFACE $<LINK_ONLY:fovea_shared_engine>)
  set_target_properties(fovea_for_c PROPERTIES EXPORT_NAME c)
  add_library(fovea::c ALIAS fovea_for_c)
  if(NOT BUILD_SHARED_LIBS)
    set_target_properties(fovea_shared_engine PROPERTIES EXPORT_NAME shared)  # fovea::fovea is the static one
  endif()
endif()
