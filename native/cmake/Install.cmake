# All libraries are installed in the package and find each other by relative paths. No version suffixes, because a wheel
# has no symbolic links.
set(_libraries ggml-base ${PYVELO_CPU_TARGETS} ggml llama velo)
if (TARGET ggml-cuda)
    list(APPEND _libraries ggml-cuda)
endif()
if (TARGET velo-lab)
    list(APPEND _libraries velo-lab velo-lab-gpu)
endif()

# A process may also load a stock llama.cpp, such as llama_cpp's, and the dynamic linker loads only one library of a
# name. So ours are libvelo-llama, libvelo-ggml and so on. Only the backends of PYVELO_PORTABLE keep their names, because
# upstream finds them by name.
function (velo_share_process target)
    get_target_property(_type ${target} TYPE)
    if (_type STREQUAL "SHARED_LIBRARY" AND NOT target MATCHES "^velo")
        set_property(TARGET ${target} PROPERTY OUTPUT_NAME velo-${target})
    endif()
    if (CMAKE_SYSTEM_NAME STREQUAL "Linux") # a library uses its own symbols, even if another library was loaded first
        target_link_options(${target} PRIVATE LINKER:-Bsymbolic)
    endif()
    if (MINGW AND CMAKE_C_COMPILER_ID STREQUAL "Clang" AND _type STREQUAL "SHARED_LIBRARY")
        target_sources(${target} PRIVATE ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/own-atexit.c)
    endif()
    # g++ would make some symbols unique in the process, across libraries
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-gnu-unique>)
    # aborts become exceptions (native/api/guard.hpp), which pass through upstream's C files
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:C,GNU,Clang,AppleClang>:-fexceptions>)
endfunction()

if (APPLE)
    set(_origin "@loader_path")
else()
    set(_origin "$ORIGIN")
endif()
foreach (_target IN LISTS _libraries)
    set_property(TARGET ${_target} PROPERTY VERSION)
    set_property(TARGET ${_target} PROPERTY SOVERSION)
    velo_share_process(${_target})
    set_target_properties(${_target} PROPERTIES INSTALL_RPATH "${_origin}" BUILD_WITH_INSTALL_RPATH OFF)
endforeach()
if (TARGET _velo)
    set_target_properties(_velo PROPERTIES INSTALL_RPATH "${_origin}/lib")
    install(TARGETS _velo COMPONENT pyvelo LIBRARY DESTINATION ${PYVELO_PACKAGE}/native)
endif()
if (TARGET ggml-cuda)
    velo_join_cuda()
endif()

install(TARGETS ${_libraries} COMPONENT pyvelo
    LIBRARY DESTINATION ${PYVELO_PACKAGE}/native/lib RUNTIME DESTINATION ${PYVELO_PACKAGE}/native/lib)

if (SKBUILD) # a wheel, whose metadata has a bill of materials
    execute_process(
        COMMAND ${Python_EXECUTABLE} ${PYVELO_ROOT}/scripts/upstream/sbom.py --tree ${PYVELO_TREE_USED}
            ${CMAKE_BINARY_DIR}/pyvelo.spdx.json
        COMMAND_ERROR_IS_FATAL ANY)
    install(FILES ${CMAKE_BINARY_DIR}/pyvelo.spdx.json COMPONENT pyvelo DESTINATION ${SKBUILD_METADATA_DIR}/sboms)
endif()
