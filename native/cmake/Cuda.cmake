# What upstream's CUDA backend needs of the machine that builds: nvcc, cuBLAS from the toolkit or from its PyPI package,
# and no driver. Included before upstream, which then finds all of it.
set(PYVELO_CUBLAS "" CACHE PATH "the folder of cuBLAS: its include/cublas_v2.h and lib (default: searched for)")

# Its own words for a missing compiler name a variable, and no remedy.
include(CheckLanguage)
find_program(PYVELO_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_PATH ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
if (NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND PYVELO_NVCC)
    set(CMAKE_CUDA_COMPILER ${PYVELO_NVCC})
endif()
check_language(CUDA)
if (NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR "PYVELO_CUDA needs NVIDIA's compiler, and no working nvcc was found: install the CUDA toolkit, "
        "put nvcc on PATH or name it with -DCMAKE_CUDA_COMPILER=/path/to/nvcc; without PYVELO_CUDA the build needs none")
endif()

# This machine's cards, or all common ones: machine code up to the newest, and its PTX for later ones.
if (NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    find_program(PYVELO_NVIDIA_SMI nvidia-smi)
    set(_card 1)
    if (PYVELO_NATIVE AND NOT PYVELO_PORTABLE AND PYVELO_NVIDIA_SMI)
        execute_process(COMMAND ${PYVELO_NVIDIA_SMI} -L RESULT_VARIABLE _card OUTPUT_QUIET ERROR_QUIET)
    endif()
    if (_card EQUAL 0)
        set(CMAKE_CUDA_ARCHITECTURES native)
    else()
        set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 86-real 89-real 90)
        execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE _known ERROR_QUIET)
        if (_known MATCHES "compute_70") # CUDA 13 knows it no more
            list(PREPEND CMAKE_CUDA_ARCHITECTURES 70-real)
        endif()
    endif()
endif()
function (velo_refuse_old_architectures)
    foreach (_architecture IN LISTS ARGN)
        if (_architecture MATCHES "^[0-9]+" AND CMAKE_MATCH_0 LESS 70)
            message(FATAL_ERROR "PYVELO_CUDA is for compute capability 7.0 and up, and ${_architecture} is among "
                "CMAKE_CUDA_ARCHITECTURES: name others (70, 75, 80, 86, 89, 90), or build without PYVELO_CUDA")
        endif()
    endforeach()
endfunction()
velo_refuse_old_architectures(${CMAKE_CUDA_ARCHITECTURES})
enable_language(CUDA)
velo_refuse_old_architectures(${CMAKE_CUDA_ARCHITECTURES_NATIVE})

# Only a driver installs the driver's library, and a library that needs it cannot be loaded without one. This target
# replaces it, here and in every later search for the toolkit.
if (UNIX)
    add_library(velo-cuda-driver STATIC ${CMAKE_CURRENT_LIST_DIR}/cuda-driver.c)
    add_library(CUDA::cuda_driver ALIAS velo-cuda-driver)
endif()
find_package(CUDAToolkit 11.8 REQUIRED)
if (UNIX)
    target_include_directories(velo-cuda-driver SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
    target_compile_options(velo-cuda-driver PRIVATE ${PYVELO_WARNINGS})
    target_link_libraries(velo-cuda-driver PRIVATE ${CMAKE_DL_LIBS})
endif()

# cuBLAS: from the named folder, the toolkit, or the site-packages of the Python that builds. An isolated build of pip
# hides its site-packages from sys.path, not from sysconfig.
set(_cublas_packages "
import site, sys, sysconfig
folders = {*sys.path, *site.getsitepackages(), sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}
print(';'.join(sorted(folder + '/nvidia' for folder in folders if folder)))
")
execute_process(COMMAND ${Python_EXECUTABLE} -c "${_cublas_packages}"
    OUTPUT_VARIABLE _folders OUTPUT_STRIP_TRAILING_WHITESPACE)
set(_packages)
foreach (_folder IN LISTS _folders)
    file(GLOB _found ${_folder}/cu${CUDAToolkit_VERSION_MAJOR} ${_folder}/cublas) # from CUDA 13 on, and before
    list(APPEND _packages ${_found})
endforeach()
if (PYVELO_CUBLAS)
    set(_places ${PYVELO_CUBLAS})
else()
    set(_places ${CUDAToolkit_LIBRARY_ROOT} ${CUDAToolkit_TARGET_DIR} ${CUDAToolkit_INCLUDE_DIRS}/.. ${_packages})
endif()

set(PYVELO_CUBLAS_INCLUDE)
foreach (_place IN LISTS _places)
    file(GLOB _library ${_place}/lib64/libcublas.so ${_place}/lib64/libcublas.so.${CUDAToolkit_VERSION_MAJOR}
        ${_place}/lib/libcublas.so ${_place}/lib/libcublas.so.${CUDAToolkit_VERSION_MAJOR}
        ${_place}/lib/x64/cublas.lib)
    if (_library AND EXISTS ${_place}/include/cublas_v2.h)
        list(GET _library 0 _library)
        get_filename_component(PYVELO_CUBLAS_INCLUDE ${_place}/include REALPATH)
        set(CUDA_cublas_LIBRARY ${_library} CACHE FILEPATH "cuBLAS, as FindCUDAToolkit takes it" FORCE)
        break()
    endif()
endforeach()
if (NOT PYVELO_CUBLAS_INCLUDE)
    if (CUDAToolkit_VERSION_MAJOR GREATER_EQUAL 13)
        set(_package nvidia-cublas)
    else()
        set(_package nvidia-cublas-cu${CUDAToolkit_VERSION_MAJOR})
    endif()
    list(JOIN _places ", " _places)
    message(FATAL_ERROR "PYVELO_CUDA needs cuBLAS for CUDA ${CUDAToolkit_VERSION_MAJOR}, and it is not in ${_places}: "
        "install the whole toolkit, or `${Python_EXECUTABLE} -m pip install ${_package}`, "
        "or name its folder with -DPYVELO_CUBLAS=DIR")
endif()
message(STATUS "cuBLAS: ${CUDA_cublas_LIBRARY}")

# The installed backend finds the runtime and cuBLAS beside the package if they are packages too, else at their paths of
# the build.
get_filename_component(_cublas ${CUDA_cublas_LIBRARY} DIRECTORY)
set(_neighbours "$ORIGIN/../../../nvidia")
set(PYVELO_CUDA_RPATH "$ORIGIN" ${_neighbours}/cu${CUDAToolkit_VERSION_MAJOR}/lib ${_neighbours}/cublas/lib
    ${_neighbours}/cuda_runtime/lib ${_cublas} ${CUDAToolkit_LIBRARY_DIR})

# After upstream: settings of its target that it cannot know.
function(velo_join_cuda)
    target_include_directories(ggml-cuda SYSTEM PRIVATE ${PYVELO_CUBLAS_INCLUDE})
    set_target_properties(ggml-cuda PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${PYVELO_CUDA_RPATH}")
endfunction()
