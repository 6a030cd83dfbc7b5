# fovea_ship_kernels(engine): puts the pack of GPU kernels beside the program `engine`, where Fovea looks for it. Without
# a pack (`make kernels` has not run) it does nothing: kernels are then compiled when a backend is created.
function(fovea_ship_kernels target)
  if(EXISTS "${fovea_KERNEL_PACK}")
    add_custom_command(TARGET ${target} POST_BUILD VERBATIM
                       COMMAND ${CMAKE_COMMAND} -E copy_if_different "${fovea_KERNEL_PACK}" $<TARGET_FILE_DIR:${target}>)
  endif()
endfunction()
