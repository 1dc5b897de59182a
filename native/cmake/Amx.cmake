# GCC's ldtilecfg intrinsic names only the first bytes of the tile configuration as read, so upstream's other stores to
# it are dropped as dead and the instruction faults (seen with GCC 12 on Sapphire Rapids, in stock too). Keep the stores.
function(velo_keep_amx_config tree)
    if (CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        foreach (_target IN LISTS ARGN)
            set_source_files_properties(${tree}/ggml/src/ggml-cpu/amx/mmq.cpp TARGET_DIRECTORY ${_target}
                PROPERTIES COMPILE_OPTIONS "-fno-tree-dse;-fno-dse")
        endforeach()
    endif()
endfunction()
