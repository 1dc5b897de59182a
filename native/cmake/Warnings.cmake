# The compiler's warnings: many for our sources, few for upstream's, which are not ours to mend. MSVC has its defaults.
set(PYVELO_WARNINGS "")
if (NOT MSVC)
    list(APPEND PYVELO_WARNINGS -Wall -Wextra -Wno-unused-function) # headers of ggml define some
    if (PYVELO_WERROR)
        list(APPEND PYVELO_WARNINGS -Werror)
    endif()
    if (CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13) # in its headers for AVX-512
        list(APPEND PYVELO_WARNINGS -Wno-uninitialized -Wno-maybe-uninitialized)
    endif()
endif()
foreach (_name GGML LLAMA)
    set(${_name}_ALL_WARNINGS OFF CACHE BOOL "" FORCE)
endforeach()

# Names of source files in messages are relative to these folders, so that binaries do not tell where they were built.
function(velo_hide_folder folder name)
    foreach (_language C CXX)
        add_compile_options($<$<COMPILE_LANG_AND_ID:${_language},GNU,Clang,AppleClang>:-ffile-prefix-map=${folder}=${name}>)
    endforeach()
    add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${folder}=${name}>)
endfunction()
