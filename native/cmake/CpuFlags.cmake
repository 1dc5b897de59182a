# Install the names of the instruction sets that the CPU backend is compiled for. Without a list, as with
# PYVELO_PORTABLE, the package checks nothing.
function(velo_install_cpu_flags target)
    get_target_property(_options ${target} COMPILE_OPTIONS)
    set(_flags ${CMAKE_CXX_FLAGS} ${_options})
    separate_arguments(_flags)
    list(FILTER _flags INCLUDE REGEX "^-m")
    set(_file ${CMAKE_CURRENT_BINARY_DIR}/cpu-flags.txt)
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cpu_flags.py
            ${_file} ${CMAKE_CXX_COMPILER} ${_flags}
        COMMAND_ERROR_IS_FATAL ANY)
    install(FILES ${_file} COMPONENT pyvelo DESTINATION pyvelo/native/lib)
endfunction()

if (CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT PYVELO_PORTABLE AND NOT CMAKE_CROSSCOMPILING)
    velo_install_cpu_flags(ggml-cpu)
endif()
