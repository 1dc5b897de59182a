# The compiler's warnings about our sources. MSVC has its defaults.
set(PYVELO_WARNINGS "")
if (NOT MSVC)
    list(APPEND PYVELO_WARNINGS -Wall -Wextra -Wno-unused-function) # headers of ggml define some
    if (PYVELO_WERROR)
        list(APPEND PYVELO_WARNINGS -Werror)
    endif()
    # its own headers for AVX-512 pass undefined vectors on purpose
    if (CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        list(APPEND PYVELO_WARNINGS -Wno-uninitialized -Wno-maybe-uninitialized)
    endif()
endif()

# Names of source files in messages are relative to these folders, so that binaries do not tell where they were built.
function(velo_hide_folder folder name)
    if (NOT MSVC)
        set(_map -ffile-prefix-map=${folder}=${name})
        add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:${_map}> $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${_map}>)
    endif()
endfunction()
