# GCC's ldtilecfg intrinsic declares only the first bytes of the tile configuration as read. GCC then drops upstream's
# other stores to it as dead, and the instruction faults (GCC 12 on Sapphire Rapids, in stock too). Keep the stores.
function(velo_keep_amx_config tree)
    if (CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
        foreach (_target IN LISTS ARGN)
            set_source_files_properties(${tree}/ggml/src/ggml-cpu/amx/mmq.cpp TARGET_DIRECTORY ${_target}
                PROPERTIES COMPILE_OPTIONS "-fno-tree-dse;-fno-dse")
        endforeach()
    endif()
endfunction()

# packed-products.cpp multiplies weights in AMX's layout on processors with AVX-512 VNNI but without AMX. Upstream packs
# this layout only in files that are compiled with AMX, so compile these with it. They execute no AMX instruction if
# velo_packed_products_suffice().
function(velo_pack_without_amx tree)
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag("-mamx-tile -mamx-int8" PYVELO_HAS_AMX_FLAGS)
    if (PYVELO_HAS_AMX_FLAGS)
        set(_backend ${tree}/ggml/src/ggml-cpu)
        set_property(SOURCE ${_backend}/amx/amx.cpp ${_backend}/amx/mmq.cpp ${_backend}/ggml-cpu.cpp
            TARGET_DIRECTORY ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -mamx-tile -mamx-int8)
    endif()
endfunction()
