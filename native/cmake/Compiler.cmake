# A machine without a compiler gets a sentence in place of CMake's report.
if (NOT (CMAKE_HOST_WIN32 OR CMAKE_CXX_COMPILER OR CMAKE_TOOLCHAIN_FILE OR DEFINED ENV{CXX}))
    find_program(PYVELO_COMPILER NAMES c++ g++ clang++ CC)
    mark_as_advanced(PYVELO_COMPILER)
    if (NOT PYVELO_COMPILER)
        message(FATAL_ERROR
            "PyVelo is built from source, and this machine has no C++ compiler. Install one (Debian and Ubuntu: apt "
            "install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install), or install a wheel, which "
            "python scripts/build/wheels.py makes on another machine.")
    endif()
endif()
