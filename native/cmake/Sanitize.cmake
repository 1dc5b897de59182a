# Sanitizer flags, the same for upstream and our code.
if (PYVELO_SANITIZE)
    string(REPLACE ";" "," _sanitizers "${PYVELO_SANITIZE}")
    add_compile_options(-fsanitize=${_sanitizers} -fno-omit-frame-pointer -g)
    add_link_options(-fsanitize=${_sanitizers})
    if ("${_sanitizers}" MATCHES "undefined")
        add_compile_options(-fno-sanitize-recover=undefined)
        add_compile_options(-fno-sanitize=enum) # upstream reads enums from files before it checks them
    endif()
    if ("${_sanitizers}" MATCHES "thread")
        set(GGML_OPENMP OFF CACHE BOOL "" FORCE) # libgomp's barriers are invisible to TSan
    endif()
endif()
