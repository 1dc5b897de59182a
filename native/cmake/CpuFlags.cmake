# Install the names of the instruction sets that the CPU backend is compiled for: none with PYVELO_PORTABLE, and none
# where the package cannot compare them with the processor.
set(_names ${CMAKE_CURRENT_BINARY_DIR}/cpu-flags.txt)
file(WRITE ${_names} "")
install(FILES ${_names} COMPONENT pyvelo DESTINATION ${PYVELO_PACKAGE}/native/lib)

function(velo_write_cpu_flags target names)
    get_target_property(_options ${target} COMPILE_OPTIONS)
    set(_flags ${CMAKE_CXX_FLAGS} ${_options})
    separate_arguments(_flags)
    list(FILTER _flags INCLUDE REGEX "^-m")
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/cpu_flags.py
            ${names} ${CMAKE_CXX_COMPILER} ${_flags}
        OUTPUT_VARIABLE _digest OUTPUT_STRIP_TRAILING_WHITESPACE
        COMMAND_ERROR_IS_FATAL ANY)
    # -march=native is one command on all machines: so a build folder that is kept compiles anew on another processor
    target_compile_definitions(${target} PRIVATE PYVELO_COMPILED_FOR_${_digest})
endfunction()

if (CMAKE_SYSTEM_NAME STREQUAL "Linux" AND NOT PYVELO_PORTABLE AND NOT CMAKE_CROSSCOMPILING)
    velo_write_cpu_flags(ggml-cpu ${_names})
endif()
