# Upstream, fetched and patched by our scripts, as a subdirectory. Its CMake files are unchanged: velo_add_sources() adds
# our sources to its targets.
if (PYVELO_TREE)
    set(_tree ${PYVELO_TREE})
else()
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${PYVELO_ROOT}/scripts/upstream/patches.py apply
        OUTPUT_VARIABLE _tree OUTPUT_STRIP_TRAILING_WHITESPACE
        RESULT_VARIABLE _status)
    if (NOT _status EQUAL 0)
        message(FATAL_ERROR "llama.cpp could not be downloaded and patched: see the error above")
    endif()
endif()
file(TO_CMAKE_PATH ${_tree} _tree)
set(PYVELO_TREE_USED ${_tree})
velo_hide_folder(${_tree} llama.cpp)
velo_hide_folder(${PYVELO_ROOT} pyvelo)
file(GLOB _patches CONFIGURE_DEPENDS ${PYVELO_ROOT}/vendor/patches/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${PYVELO_ROOT}/vendor/series ${PYVELO_ROOT}/vendor/upstream.txt ${_patches})

function(velo_upstream_option name value)
    set(${name} ${value} CACHE BOOL "" FORCE)
endfunction()
velo_upstream_option(BUILD_SHARED_LIBS ON)
if (PYVELO_PORTABLE)
    velo_upstream_option(GGML_NATIVE OFF)
else()
    velo_upstream_option(GGML_NATIVE ${PYVELO_NATIVE})
endif()
velo_upstream_option(GGML_BACKEND_DL ${PYVELO_PORTABLE})
velo_upstream_option(GGML_CPU_ALL_VARIANTS ${PYVELO_PORTABLE})
velo_upstream_option(GGML_CUDA ${PYVELO_CUDA})
foreach (_name METAL BLAS ACCELERATE) # of macOS: there, too, our kernels compute, and give the same bits
    velo_upstream_option(GGML_${_name} OFF)
endforeach()
velo_upstream_option(GGML_ALL_WARNINGS OFF) # they are not ours to mend
velo_upstream_option(LLAMA_ALL_WARNINGS OFF)
velo_upstream_option(LLAMA_OPENSSL OFF)
velo_upstream_option(LLAMA_BUILD_COMMON ${PYVELO_UPSTREAM_TESTS})
velo_upstream_option(LLAMA_BUILD_TESTS ${PYVELO_UPSTREAM_TESTS})
velo_upstream_option(LLAMA_BUILD_TOOLS ${PYVELO_UPSTREAM_TESTS})
velo_upstream_option(LLAMA_BUILD_EXAMPLES OFF)
velo_upstream_option(LLAMA_BUILD_SERVER OFF)
velo_upstream_option(LLAMA_BUILD_APP OFF)

if (PYVELO_CUDA)
    include(Cuda)
endif()
add_subdirectory(${_tree} llama.cpp)

# Upstream's test programs compile sooner without costly optimizations; they measure nothing.
if (PYVELO_UPSTREAM_TESTS AND NOT MSVC)
    foreach (_folder common tests)
        get_property(_targets DIRECTORY ${_tree}/${_folder} PROPERTY BUILDSYSTEM_TARGETS)
        foreach (_target IN LISTS _targets)
            get_target_property(_type ${_target} TYPE)
            if (NOT _type MATCHES "INTERFACE|UTILITY")
                target_compile_options(${_target} PRIVATE -O1)
            endif()
        endforeach()
    endforeach()
endif()

# Add our files to a target of upstream. nvcc does not accept the compiler's warning options.
function(velo_add_sources target)
    list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ OUTPUT_VARIABLE _files)
    target_sources(${target} PRIVATE ${_files})
    set_source_files_properties(${_files} TARGET_DIRECTORY ${target}
        PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON COMPILE_OPTIONS "$<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:${PYVELO_WARNINGS}>")
endfunction()

# Variants of the CPU backend: one, or one for each instruction set with GGML_CPU_ALL_VARIANTS.
get_property(_targets DIRECTORY ${_tree}/ggml/src PROPERTY BUILDSYSTEM_TARGETS)
list(FILTER _targets INCLUDE REGEX "^ggml-cpu")
list(FILTER _targets EXCLUDE REGEX "-feats$") # checks whether a variant runs on a processor

# Compilers such as GCC before version 14 know no SME, which some variants for ARM have. The backend's target depends on them, so they
# become empty, and are not installed.
set(_with_sme ${_targets})
list(FILTER _with_sme INCLUDE REGEX "-armv9|-apple_m4")
if (_with_sme)
    include(CheckCCompilerFlag)
    check_c_compiler_flag(-march=armv9.2-a+sme PYVELO_COMPILES_SME)
    if (NOT PYVELO_COMPILES_SME)
        file(WRITE ${CMAKE_BINARY_DIR}/nothing.c "")
        set_target_properties(${_with_sme} PROPERTIES SOURCES ${CMAKE_BINARY_DIR}/nothing.c COMPILE_OPTIONS "")
        list(REMOVE_ITEM _targets ${_with_sme})
        message(STATUS "left out, because the compiler does not know their instructions: ${_with_sme}")
    endif()
endif()
set(PYVELO_CPU_TARGETS ${_targets})

include(Amx)
velo_keep_amx_config(${_tree} ${PYVELO_CPU_TARGETS})
velo_pack_without_amx(${_tree} ${PYVELO_CPU_TARGETS})
