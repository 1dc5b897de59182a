# A machine without a compiler gets a sentence in place of CMake's report.
function (velo_need_compiler language variable)
    if (SKBUILD AND DEFINED ENV{${variable}}) # of scikit-build-core: the one that built Python, which need not be here
        separate_arguments(_command NATIVE_COMMAND "$ENV{${variable}}")
        list(GET _command 0 _program)
        find_program(_found NAMES ${_program} NO_CACHE)
        if (NOT _found)
            message(STATUS "${variable} is ${_program}, which is not on this machine: another compiler is looked for")
            unset(ENV{${variable}})
        endif()
    endif()
    if (NOT DEFINED ENV{${variable}})
        find_program(_compiler NAMES ${ARGN} NO_CACHE)
        if (NOT _compiler)
            message(FATAL_ERROR
                "PyVelo is built from source, and this machine has no ${language} compiler. Install one (Debian and "
                "Ubuntu: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install), or install a "
                "wheel, which python scripts/build/wheels.py makes on another machine.")
        endif()
    endif()
endfunction()

if (NOT (CMAKE_HOST_WIN32 OR CMAKE_CXX_COMPILER OR CMAKE_TOOLCHAIN_FILE))
    velo_need_compiler(C++ CXX c++ g++ clang++ CC)
    velo_need_compiler(C CC cc gcc clang)
endif()
